"""Read pruned checkpoints of other tools as tensors and masks.

A format is recognized by its content. IMPORTERS lists them in the order in which they are tried.
Reading runs no code: pickles are read with `torch.load(weights_only=True)`, and what that rejects is an error.
If a source has masks, a live weight that happens to be zero stays live. If it has none, zeros are pruned.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.files import sparse_file
from growprune.files.importers.contents import Contents, Source, open_contents
from growprune.files.importers.imported import Imported, fill_model, masks_by_zeros
from growprune.files.manifest import FORMAT
from growprune.files.reader import open_sparse
from growprune.files.weights_file import weights_file
from growprune.sparse.model import SparseModel

__all__ = ["IMPORTERS", "Imported", "load", "load_weights", "read"]


def read(source: Source) -> Imported:
    """Read the dense tensors of a source under their plain names, and the masks of the sparse ones.

    Args:
        source: a file (safetensors or torch.save), a folder of transformers, a module, or a state dict.

    Examples:
        >>> from torch.nn.utils import prune
        >>> layer = prune.l1_unstructured(nn.Linear(4, 2), "weight", amount=6)
        >>> found = read(layer)
        >>> found.format, int(found.masks["weight"].sum()), sorted(found.tensors)
        ('torch-prune', 2, ['bias', 'weight'])
    """
    contents = open_contents(source)
    return next(found for importer in IMPORTERS if (found := importer(contents)) is not None)


def load(source: Source, model: nn.Module, **settings: Any) -> SparseModel:
    """Fill a model from a source, and return it as a SparseModel with the masks of the source, ready for training.

    Args:
        model: the same model, without the additions of the other tool.
        settings: arguments of SparseModel. By default, sparsity is that of the source and allocation is "global".
    """
    return read(source).into(model, **settings)


def load_weights(sparse: SparseModel, path: str | os.PathLike[str], *, with_masks: bool = False) -> None:
    """Fill a model whose weights are all live from a file that has exactly its tensors.

    Args:
        path: a file, or a folder such as that of a run.
        with_masks: apply the masks of the file; in a dense file, the non-zero weights are live.
    """
    path = weights_file(path)
    found = read(path)
    names = found.names_in(sparse.model, str(path))

    def mask(name: str) -> Tensor | None:
        if not with_masks:
            return None
        return found.tensors[names[name]] != 0 if found.format == "dense" else found.masks.get(names[name])

    fill_model(sparse, names, lambda name: found.tensors[names[name]], mask)


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


IMPORTERS: tuple[Callable[[Contents], Imported | None], ...] = (read_growprune, read_torch_prune, read_dense)
"""Each returns None for a source of another format. The first that recognizes a source reads it."""
