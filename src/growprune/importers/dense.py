"""Plain checkpoints, in which zeros are all that is left of pruning."""

from __future__ import annotations

from growprune.importers.contents import Contents
from growprune.importers.imported import Imported, Importer, with_zeros


def signs(contents: Contents) -> str:
    return f"{len(contents.tensors)} plain tensors, such as {next(iter(contents.tensors), 'none')!r}"


def read(contents: Contents) -> Imported:
    return with_zeros(contents, "dense", dict(contents.tensors))


DENSE = Importer("a plain dense checkpoint", "tensors under their plain names", signs, read)
