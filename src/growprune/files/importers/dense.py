"""Plain checkpoints, in which zeros are all that is left of pruning."""

from __future__ import annotations

from growprune.errors import GrowpruneError
from growprune.files.importers.contents import Contents
from growprune.files.importers.imported import Imported, Importer, with_zeros


def signs(contents: Contents) -> str:
    return f"{len(contents.tensors)} plain tensors, such as {next(iter(contents.tensors), 'none')!r}"


def read(contents: Contents) -> Imported:
    if lost := _values_of_ours(contents):
        raise GrowpruneError(
            f"{contents.where} has {lost} and its mask, as a sparse file of growprune, but not the metadata of one: it "
            f"is damaged, fetch or save it again"
        )
    return with_zeros(contents, "dense", dict(contents.tensors))


def _values_of_ours(contents: Contents) -> str | None:
    """The live values of a tensor, by name, if their mask is there as well: nothing that is dense."""
    names = (name for name, tensor in contents.tensors.items() if name.endswith(".values") and tensor.dim() == 1)
    masks = (".mask", ".gaps")
    return next((n for n in names if any(n.removesuffix(".values") + m in contents.tensors for m in masks)), None)


DENSE = Importer("a plain dense checkpoint", "tensors under their plain names", signs, read)
