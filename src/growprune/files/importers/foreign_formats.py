"""The formats of growprune itself, of torch.nn.utils.prune, and plain dense checkpoints."""

from __future__ import annotations

from pathlib import Path

from growprune.errors import GrowpruneError
from growprune.files import sparse_file
from growprune.files.importers.contents import Contents
from growprune.files.importers.imported import Imported, Importer, masks_by_zeros, with_masks
from growprune.files.manifest import FORMAT
from growprune.files.reader import open_sparse

ORIGINAL, MASK = "_orig", "_mask"


def _is_ours(contents: Contents) -> bool:
    return contents.path is not None and contents.metadata.get("format") == FORMAT


def _read_ours(contents: Contents) -> Imported:
    path = contents.path or Path()
    tensors = sparse_file.read(path)
    with open_sparse(path) as opened:
        masks = {entry.name: opened.mask(entry) for entry in opened.prunable if entry.is_sparse}
        plain = {name: tensor for name, tensor in tensors.items() if name not in opened.aliases}
        return Imported("growprune", plain, masks, opened.aliases, contents.notes)


def _pruned_by_torch(contents: Contents) -> list[str]:
    """Return the names of pruned parameters: `weight` is stored as `weight_orig` with the buffer `weight_mask`."""
    stems = (name.removesuffix(ORIGINAL) for name in contents.tensors if name.endswith(ORIGINAL))
    return [stem for stem in stems if f"{stem}{MASK}" in contents.tensors and stem not in contents.tensors]


def _read_torch_prune(contents: Contents) -> Imported:
    pruned = set(_pruned_by_torch(contents))
    stored = {f"{name}{MASK}" for name in pruned}
    tensors = {
        stem if (stem := name.removesuffix(ORIGINAL)) in pruned else name: tensor
        for name, tensor in contents.tensors.items()
        if name not in stored
    }
    return with_masks(contents, "torch-prune", tensors, {name: contents.tensors[f"{name}{MASK}"] for name in pruned})


def _read_dense(contents: Contents) -> Imported:
    """Read a dense checkpoint, where only zeros show what was pruned."""
    for name, tensor in contents.tensors.items():
        stem = name.removesuffix(".values")
        if stem != name and tensor.dim() == 1 and not {f"{stem}.mask", f"{stem}.gaps"}.isdisjoint(contents.tensors):
            raise GrowpruneError(
                f"{contents.where} has {name} and its mask, like a sparse file of growprune, but lacks its metadata: "
                f"it is damaged, download or save it again"
            )
    tensors = dict(contents.tensors)
    return Imported("dense", tensors, masks_by_zeros(tensors), contents.aliases, contents.notes)


GROWPRUNE = Importer(_is_ours, _read_ours)
TORCH_PRUNE = Importer(lambda contents: bool(_pruned_by_torch(contents)), _read_torch_prune)
DENSE = Importer(lambda contents: True, _read_dense)
