"""What an importer is, and what it gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError, warn
from growprune.files.importers.bare import bare_model
from growprune.files.importers.contents import Contents
from growprune.files.importers.filling import TensorsFor, fitting
from growprune.masks.layers import Weight, prunable_weights
from growprune.masks.patterns import Pattern, parse_pattern
from growprune.masks.zeros import LEAST, masks_of_zeros
from growprune.sparse.internals import internals
from growprune.sparse.model import SparseModel


@dataclass(frozen=True)
class Imported:
    """Dense tensors by their plain names, and which of their weights live."""

    format: str
    """The name of its importer."""
    tensors: dict[str, Tensor]
    masks: dict[str, Tensor] = field(default_factory=dict)
    """Of sparse matrices only: those of two dimensions and more in which not all is alive."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """{other name: first name} of tensors that have several."""
    notes: tuple[str, ...] = ()
    """What was not taken over, and what to know of it."""

    @property
    def num_weights(self) -> int:
        """Of the sparse matrices, dead or alive."""
        return sum(mask.numel() for mask in self.masks.values())

    @property
    def num_alive(self) -> int:
        return sum(int(torch.count_nonzero(mask)) for mask in self.masks.values())

    @property
    def sparsity(self) -> float:
        """Of the sparse matrices; 0 if there are none."""
        return 1 - self.num_alive / self.num_weights if self.masks else 0.0

    @property
    def dense_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def into(self, model: nn.Module, *, pattern: str | Pattern = "unstructured", **settings: Any) -> SparseModel:
        """Fill a model, and return it as a SparseModel with these masks; see `growprune.files.importers.load`.

        The model is checked before it is touched. Names may have one word more than the model's, as "model." in a
        checkpoint of Lightning.
        """
        pattern = parse_pattern(pattern)
        names = fitting(self.tensors, self.aliases, model, self.format)
        chosen = {name: settings.get(name, ()) for name in ("keep_dense", "include")}
        weights = prunable_weights(model, **chosen)
        masks = _masks_for(weights, names, self.masks, pattern)
        self._warn_of_dense(names, {weight.parameter for weight in weights})
        settings.setdefault("sparsity", _share_of_dead(weights, masks))
        settings.setdefault("allocation", "global")
        sparse = SparseModel(model, pattern=pattern, **settings)
        internals(sparse).restore(TensorsFor(sparse, self.tensors, names, masks))
        return sparse

    def _warn_of_dense(self, names: Mapping[str, str], prunable: set[str]) -> None:
        if not self.masks:
            warn(f"nothing is sparse in what was read as {self.format}: all weights live")
        if dense := [name for name, theirs in names.items() if theirs in self.masks and name not in prunable]:
            warn(f"{', '.join(dense[:5])} is sparse in the source, but dense in the model: name it in include")


@dataclass(frozen=True)
class Importer:
    """A format: how it is known, and how it is read."""

    title: str
    """Whose format it is, for readers."""
    wants: str
    """What a source of it has, for errors."""
    signs: Callable[[Contents], str]
    """What of it is found, in words; empty if it is of another format."""
    read: Callable[[Contents], Imported]


def with_masks(contents: Contents, format: str, tensors: dict[str, Tensor], masks: dict[str, Tensor]) -> Imported:
    """What a format with masks gives: what they hide is exactly zero, and what has no mask lives.

    Args:
        tensors: by their plain names; those with a mask are replaced.
        masks: as they were stored, of any dtype: what is not zero lives.
    """
    alive: dict[str, Tensor] = {}
    for name, stored in masks.items():
        mask = stored.detach() != 0
        if mask.shape != tensors[name].shape:
            has = f"{tuple(tensors[name].shape)} and its mask {tuple(mask.shape)}"
            raise GrowpruneError(f"{contents.where} has {name} with shape {has}: it is damaged, fetch or save it again")
        if not mask.all():
            tensors[name] = torch.where(mask, tensors[name], torch.zeros((), dtype=tensors[name].dtype))
            if mask.ndim >= 2:
                alive[name] = mask
    zeros = [name for name in masks_by_zeros(tensors) if name not in masks]
    notes = [f"{name} has zeros and no mask, so all of it is alive" for name in zeros[:3]]
    return Imported(format, tensors, alive, contents.aliases_among(tensors), (*contents.notes, *notes))


def with_zeros(contents: Contents, format: str, tensors: dict[str, Tensor]) -> Imported:
    """What a format without masks gives: zeros are dead, in matrices that have more than a few."""
    aliases = contents.aliases_among(tensors)
    return Imported(format, tensors, masks_by_zeros(tensors), aliases, contents.notes)


def masks_by_zeros(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Masks of the matrices at least 5 % of which are zero: a few zeros, any model may have."""
    masks: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        is_matrix = tensor.ndim >= 2 and tensor.is_floating_point() and tensor.element_size() > 1  # not float8
        if is_matrix and int(torch.count_nonzero(tensor)) <= (1 - LEAST) * tensor.numel() and tensor.numel():
            masks[name] = tensor != 0
    return masks


def _masks_for(
    weights: tuple[Weight, ...], names: Mapping[str, str], masks: Mapping[str, Tensor], pattern: Pattern
) -> dict[str, Tensor]:
    """By parameter of the model: which weights live; of blocks, those with a weight that lives."""
    found = {}
    for weight in weights:
        if (theirs := masks.get(names[weight.parameter])) is not None:
            found[weight.parameter] = theirs
    if pattern.is_single or not found:
        return found
    sparse = [weight for weight in weights if weight.parameter in found]
    as_model = bare_model({name: mask.to(torch.uint8) for name, mask in found.items()})
    return masks_of_zeros(as_model, sparse, pattern)


def _share_of_dead(weights: tuple[Weight, ...], masks: Mapping[str, Tensor]) -> float:
    total = sum(math.prod(weight.shape) for weight in weights)
    dead = sum(
        weight.numel - int(torch.count_nonzero(weight.of(masks[weight.parameter])))
        for weight in weights
        if weight.parameter in masks
    )
    if dead == total:
        raise GrowpruneError("all prunable weights are zero: there is no model in it")
    return dead / total
