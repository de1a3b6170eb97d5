"""What importers return: tensors and masks, and how a model is filled with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError, warn
from growprune.files.reader import matching_names
from growprune.masks.bits import pack
from growprune.masks.inspection import LEAST, masks_of_zeros
from growprune.masks.layers import prunable_weights
from growprune.masks.patterns import Pattern, parse_pattern
from growprune.sparse.model import SparseModel

MAX_DEPTH = 64
"""The most dots in a name. Walking a deeper model would overflow Python's stack."""


@dataclass(frozen=True)
class Imported:
    """Dense tensors by their plain names, and their masks."""

    format: str
    """The name of its importer."""
    tensors: dict[str, Tensor]
    masks: dict[str, Tensor] = field(default_factory=dict)
    """The masks of sparse matrices: tensors with two or more dimensions that are not fully live."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """{other name: first name} of tensors with several names."""
    notes: tuple[str, ...] = ()
    """Notes for the user, such as what was not imported."""

    @property
    def num_alive(self) -> int:
        """The number of live weights of the sparse matrices."""
        return sum(int(torch.count_nonzero(mask)) for mask in self.masks.values())

    @property
    def sparsity(self) -> float:
        """The sparsity of the sparse matrices; 0 if there are none."""
        return 1 - self.num_alive / sum(mask.numel() for mask in self.masks.values()) if self.masks else 0.0

    @property
    def dense_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def names_in(self, model: nn.Module, where: str) -> dict[str, str]:
        """Map each tensor of a model to its first name here. Raise unless they are the same, with the same shapes."""
        theirs = {name: name for name in self.tensors} | dict(self.aliases)
        shapes = {name: tuple(self.tensors[first].shape) for name, first in theirs.items()}
        return {ours: theirs[name] for ours, name in matching_names(shapes, model, where).items()}

    def into(self, model: nn.Module, *, pattern: str | Pattern = "unstructured", **settings: Any) -> SparseModel:
        """Fill a model, and return it as a SparseModel with these masks; see `growprune.files.importers.load`.

        The model is checked before it is changed.
        """
        pattern = parse_pattern(pattern)
        names = self.names_in(model, f"the {self.format} source")
        chosen = {name: settings.get(name, ()) for name in ("keep_dense", "include")}
        weights = prunable_weights(model, **chosen)
        if not self.masks:
            warn(f"the {self.format} source has no sparse weights, so all weights are live")
        prunable = {weight.parameter for weight in weights}
        if dense := [name for name, theirs in names.items() if theirs in self.masks and name not in prunable]:
            warn(f"{', '.join(dense[:5])} is sparse in the source, but dense in the model: add it to include")
        masks = {name: self.masks[names[name]] for name in prunable if names[name] in self.masks}
        if masks and not pattern.is_single:  # a block is live if any of its weights is
            as_model = bare_model({name: mask.to(torch.uint8) for name, mask in masks.items()})
            masks = masks_of_zeros(as_model.get_parameter, [w for w in weights if w.parameter in masks], pattern)
        total = sum(math.prod(weight.shape) for weight in weights)
        dead = sum(
            weight.numel - int(torch.count_nonzero(weight.of(masks[weight.parameter])))
            for weight in weights
            if weight.parameter in masks
        )
        if dead == total:
            raise GrowpruneError("all prunable weights of the source are zero, so there is nothing to load")
        sparse = SparseModel(
            model, **{"pattern": pattern, "sparsity": dead / total, "allocation": "global", **settings}
        )
        fill_model(sparse, names, lambda name: self.tensors[names[name]], masks.get)
        return sparse


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


def masks_by_zeros(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return masks of the matrices that are at least 5 % zero. Any model may have a few zeros."""
    masks: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        is_matrix = tensor.ndim >= 2 and tensor.is_floating_point() and tensor.element_size() > 1  # not float8
        if is_matrix and int(torch.count_nonzero(tensor)) <= (1 - LEAST) * tensor.numel() and tensor.numel():
            masks[name] = tensor != 0
    return masks


def bare_model(tensors: Mapping[str, Tensor], aliases: Mapping[str, str] | None = None) -> nn.Module:
    """Return a module that only holds tensors under their names. It shares their memory.

    >>> [name for name, _ in bare_model({"a.weight": Tensor(2, 2), "a.bias": Tensor(2)}).named_parameters()]
    ['a.weight', 'a.bias']
    """
    root = nn.Module()
    made = {name: nn.Parameter(tensor.detach(), requires_grad=False) for name, tensor in tensors.items()}
    for name, parameter in (made | {alias: made[name] for alias, name in (aliases or {}).items()}).items():
        *path, local = name.split(".")
        if len(path) > MAX_DEPTH:
            raise GrowpruneError(f"the name {name[:60]!r} has more than {MAX_DEPTH} dots, which is not supported")
        module = root
        try:
            for step in path:
                if step not in module._modules:
                    module.add_module(step, nn.Module())
                module = module.get_submodule(step)
            module.register_parameter(local, parameter)
        except (AttributeError, KeyError, TypeError) as error:
            why = f"a model cannot have a tensor named {name!r} with the others ({error.args[0]})"
            raise GrowpruneError(why) from None
    return root
