"""Which tensor of a source is which of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.files.writer import tensors_of
from growprune.masks.bits import pack
from growprune.sparse.model import SparseModel


def fitting(tensors: Mapping[str, Tensor], aliases: Mapping[str, str], model: nn.Module, what: str) -> dict[str, str]:
    """By each name of the model, that in the source; raises unless all are there, with their shapes, and no more."""
    ours, others = tensors_of(model)
    theirs = {name: name for name in tensors} | dict(aliases)
    names = {name: _first([name, *(a for a, n in others.items() if n == name)], theirs) for name in ours}
    if not any(names.values()) and (prefix := _common_word(theirs)):
        return _prefixed(prefix, fitting(_without(prefix, tensors), _without_in_both(prefix, aliases), model, what))
    for name, tensor in ours.items():
        if not names[name]:
            has = f"it has names like {next(iter(theirs), 'none')!r}"
            raise GrowpruneError(f"the {what} source lacks {name}, which the model has; {has}: build the same model")
        if tensors[names[name]].shape != tensor.shape:
            shapes = f"{tuple(tensors[names[name]].shape)}, but the model with {tuple(tensor.shape)}"
            raise GrowpruneError(f"the {what} source has {name} with shape {shapes}: build the same model")
    if unknown := sorted(set(theirs) - set(ours) - set(others)):
        raise GrowpruneError(f"the {what} source has {unknown[0]}, which the model lacks: build the same model")
    return names


def _first(names: list[str], theirs: Mapping[str, str]) -> str:
    return next((theirs[name] for name in names if name in theirs), "")


def _common_word(names: Mapping[str, str]) -> str:
    """What all names begin with, up to the first dot; empty if they differ in it."""
    words = {name.partition(".")[0] for name in names if "." in name}
    return f"{words.pop()}." if len(words) == 1 and all("." in name for name in names) else ""


def _without(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _without_in_both(prefix: str, aliases: Mapping[str, str]) -> dict[str, str]:
    return {alias.removeprefix(prefix): name.removeprefix(prefix) for alias, name in aliases.items()}


def _prefixed(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    return {ours: prefix + theirs for ours, theirs in names.items()}


class TensorsFor(Mapping[str, tuple[Tensor, Tensor | None]]):
    """What `Internals.restore` takes, made of one tensor at a time."""

    def __init__(
        self, sparse: SparseModel, tensors: Mapping[str, Tensor], names: Mapping[str, str], masks: Mapping[str, Tensor]
    ) -> None:
        self._prunable = {weight.parameter for weight in sparse.weights}
        self._tensors, self._names, self._masks = tensors, names, masks

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> tuple[Tensor, Tensor | None]:
        tensor = self._tensors[self._names[name]]
        if name not in self._prunable:
            return tensor, None
        mask = self._masks.get(name)
        mask = torch.ones(tensor.shape, dtype=torch.bool) if mask is None else mask
        return tensor[mask], pack(mask)
