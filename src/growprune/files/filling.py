"""Fill a sparse model with the tensors of a file or of another model, with any settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from growprune.files.reader import SparseFile, is_ours, matching_names, open_safetensors
from growprune.files.weights_file import weights_file
from growprune.masks.bits import pack
from growprune.sparse.model import SparseModel


def load_weights(sparse: SparseModel, path: str | os.PathLike[str], *, with_masks: bool = False) -> None:
    """Fill a model whose weights are all live from a safetensors file that has exactly its tensors.

    Args:
        path: a sparse file, plain safetensors, or a folder with one of them.
        with_masks: apply the masks of the file; in a plain file, the non-zero weights are live.
    """
    path = weights_file(path)
    with open_safetensors(path) as handle:
        file = SparseFile(path, handle) if is_ours(handle) else None
        if file is None:
            shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
            tensor = handle.get_tensor
        else:
            entries = file.entries | {alias: file.entries[name] for alias, name in file.aliases.items()}
            shapes = {name: entry.shape for name, entry in entries.items()}

            def tensor(name: str) -> Tensor:
                return file.dense(entries[name])

        names = matching_names(shapes, sparse.model, str(path))

        def mask(name: str) -> Tensor | None:
            theirs = names[name]
            return None if not with_masks else tensor(theirs) != 0 if file is None else file.mask(entries[theirs])

        fill_model(sparse, names, lambda name: tensor(names[name]), mask)


def fill_model(
    sparse: SparseModel,
    names: Collection[str],
    tensor: Callable[[str], Tensor],
    mask: Callable[[str], Tensor | None],
) -> None:
    """Fill a new SparseModel, one tensor at a time.

    Args:
        names: the names of the model's tensors.
        tensor: returns the dense tensor for a name.
        mask: returns the mask of a prunable tensor; None if all of it is live.
    """
    for name in names:
        dense = tensor(name)
        weights = [weight for weight in sparse.weights if weight.parameter == name]
        if not weights:
            sparse.restore_some({name: (dense, None)})
            continue
        alive = torch.ones(dense.shape, dtype=torch.bool)
        if (theirs := mask(name)) is not None:
            for weight in weights:  # what the model keeps dense lives, whatever it does in the source
                weight.of(alive).copy_(weight.of(theirs))
        sparse.restore_some({name: (dense[alive], pack(alive))})
