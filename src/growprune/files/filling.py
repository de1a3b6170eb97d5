"""Fill a sparse model with the tensors of a file or of another model, with any settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.files.reader import SparseFile, is_ours, open_safetensors
from growprune.files.weights_file import weights_file
from growprune.masks.bits import pack
from growprune.masks.layers import dense_shape, tensors_of
from growprune.sparse.model import SparseModel


class _Source(NamedTuple):
    """The dense tensors of a file and their masks, by all of their names."""

    shapes: Mapping[str, tuple[int, ...]]
    tensor: Callable[[str], Tensor]
    mask: Callable[[str], Tensor]


def load_weights(sparse: SparseModel, path: str | os.PathLike[str], *, with_masks: bool = False) -> None:
    """Fill a model whose weights are all live from a safetensors file that has exactly its tensors.

    Args:
        path: a sparse file, plain safetensors, or a folder with one of them.
        with_masks: apply the masks of the file; in a plain file, the non-zero weights are live.
    """
    path = weights_file(path)
    with open_safetensors(path) as handle:
        source = _sparse_source(path, handle) if is_ours(handle) else _plain_source(handle)
        names = matching_names(source.shapes, sparse.model, str(path))

        def mask(name: str) -> Tensor | None:
            return source.mask(names[name]) if with_masks else None

        fill_model(sparse, names, lambda name: source.tensor(names[name]), mask)


def _sparse_source(path: Path, handle: Any) -> _Source:
    file = SparseFile(path, handle)
    entries = file.entries | {alias: file.entries[name] for alias, name in file.aliases.items()}
    shapes = {name: entry.shape for name, entry in entries.items()}
    return _Source(shapes, lambda name: file.dense(entries[name]), lambda name: file.mask(entries[name]))


def _plain_source(handle: Any) -> _Source:
    """Read safetensors without masks, where zeros are pruned."""
    shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
    return _Source(shapes, handle.get_tensor, lambda name: handle.get_tensor(name) != 0)


def matching_names(theirs: Mapping[str, Any], model: nn.Module, where: str) -> dict[str, str]:
    """Map each tensor of a model to its name in the source. Raise unless exactly these exist, with these shapes.

    The names of the source may have one common prefix more, such as "model." in a checkpoint of Lightning.
    """
    ours, aliases = tensors_of(model)
    prefix = "" if {*ours, *aliases} & set(theirs) else _common_word(theirs)
    shapes = {name.removeprefix(prefix): shape for name, shape in theirs.items()}
    names: dict[str, str] = {}
    for name, tensor in ours.items():
        known = [name, *(alias for alias, first in aliases.items() if first == name)]
        here = next((n for n in known if n in shapes), None)
        if here is None:
            has = f"it has names like {next(iter(theirs), 'none')!r}"
            raise GrowpruneError(f"{where} lacks {name}, which the model has; {has}: build the same model")
        if tuple(shapes[here]) != (shape := _shape(model, name, tensor)):
            has = f"{tuple(shapes[here])}, but the model has {shape}"
            raise GrowpruneError(f"{where} has {here} with shape {has}: build the same model")
        names[name] = prefix + here
    if unknown := sorted(set(shapes) - set(ours) - set(aliases)):
        raise GrowpruneError(f"{where} has {unknown[0]}, which the model lacks: build the same model")
    return names


def _common_word(names: Mapping[str, Any]) -> str:
    """Return the common prefix of all names, up to the first dot; empty if they differ."""
    words = {name.partition(".")[0] for name in names if "." in name}
    return f"{words.pop()}." if len(words) == 1 and all("." in name for name in names) else ""


def _shape(model: nn.Module, name: str, tensor: Tensor) -> tuple[int, ...]:
    path, _, local = name.rpartition(".")
    module = model.get_submodule(path)
    return dense_shape(module, local) if local in module._parameters else tuple(tensor.shape)


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
