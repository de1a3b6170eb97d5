"""The formats of growprune itself, of torch.nn.utils.prune, and plain dense checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.files import sparse_file
from growprune.files.importers.contents import Contents
from growprune.files.importers.imported import Imported, masks_by_zeros
from growprune.files.manifest import FORMAT
from growprune.files.reader import open_sparse


def read_growprune(contents: Contents) -> Imported | None:
    if contents.path is None or contents.metadata.get("format") != FORMAT:
        return None
    tensors = sparse_file.read(contents.path)
    with open_sparse(contents.path) as opened:
        masks = {entry.name: opened.mask(entry) for entry in opened.prunable if entry.is_sparse}
        plain = {name: tensor for name, tensor in tensors.items() if name not in opened.aliases}
        return Imported("growprune", plain, masks, opened.aliases, contents.notes)


def read_torch_prune(contents: Contents) -> Imported | None:
    """Read what `weight_orig` and the buffer `weight_mask` store. Masked weights become exactly zero."""
    stored = contents.tensors
    stems = [name.removesuffix("_orig") for name in stored if name.endswith("_orig")]
    pruned = {stem for stem in stems if f"{stem}_mask" in stored and stem not in stored}
    if not pruned:
        return None
    masks: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for full, tensor in stored.items():
        name = full.removesuffix("_orig")
        if full.removesuffix("_mask") in pruned:
            continue
        if name not in pruned:
            tensors[full] = tensor
            continue
        mask = stored[f"{name}_mask"].detach() != 0
        if mask.shape != tensor.shape:
            has = f"{tuple(tensor.shape)} and its mask {tuple(mask.shape)}"
            raise GrowpruneError(
                f"{contents.where} has {name} with shape {has}: it is damaged, download or save it again"
            )
        tensors[name] = torch.where(mask, tensor, torch.zeros((), dtype=tensor.dtype))
        if mask.ndim >= 2 and not mask.all():
            masks[name] = mask
    zeros = [name for name in masks_by_zeros(tensors) if name not in pruned]
    notes = [f"{name} has zeros but no mask, so all of it is live" for name in zeros[:3]]
    aliases = {alias: name for alias, name in contents.aliases.items() if name in tensors}
    return Imported("torch-prune", tensors, masks, aliases, (*contents.notes, *notes))


def read_dense(contents: Contents) -> Imported:
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
