"""torch.nn.utils.prune: a parameter `weight` is there as `weight_orig`, beside the buffer `weight_mask`."""

from __future__ import annotations

from growprune.files.importers.contents import Contents
from growprune.files.importers.imported import Imported, Importer, with_masks

ORIGINAL, MASK = "_orig", "_mask"


def pruned_names(contents: Contents) -> list[str]:
    """The plain names of what has been pruned."""
    stems = (name.removesuffix(ORIGINAL) for name in contents.tensors if name.endswith(ORIGINAL))
    return [stem for stem in stems if f"{stem}{MASK}" in contents.tensors and stem not in contents.tensors]


def signs(contents: Contents) -> str:
    names = pruned_names(contents)
    return f"{names[0]}{ORIGINAL} with {names[0]}{MASK}" if names else ""


def read_as(contents: Contents, format: str) -> Imported:
    pruned = set(pruned_names(contents))
    stored = {f"{name}{MASK}" for name in pruned}
    tensors = {
        stem if (stem := name.removesuffix(ORIGINAL)) in pruned else name: tensor
        for name, tensor in contents.tensors.items()
        if name not in stored
    }
    return with_masks(contents, format, tensors, {name: contents.tensors[f"{name}{MASK}"] for name in pruned})


def read(contents: Contents) -> Imported:
    return read_as(contents, "torch-prune")


TORCH_PRUNE = Importer("a checkpoint of torch.nn.utils.prune", "tensors NAME_orig, each with NAME_mask", signs, read)
