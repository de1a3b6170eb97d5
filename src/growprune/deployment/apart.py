"""A model that cannot be taken as a whole, part by part: every largest part that can be, and single layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from growprune.deployment.measure import Chosen, Row
from growprune.deployment.parts import LinearPart, Part
from growprune.deployment.skeleton import Skeleton, fill_in
from growprune.deployment.trace import NotTraceable
from growprune.deployment.weights import does_more

Inputs = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]


class Swapped(Protocol):
    """A part in the place of a module."""

    @property
    def owner(self) -> nn.Module: ...
    @property
    def name(self) -> str: ...
    @property
    def part(self) -> nn.Module: ...
    @property
    def module(self) -> nn.Module: ...


@dataclass(frozen=True)
class Replaced:
    """One whose module is kept."""

    owner: nn.Module
    name: str
    part: nn.Module
    module: nn.Module


@dataclass
class Found:
    """A module with its parts deployed."""

    module: nn.Module
    rows: list[Row]
    in_torch: list[str]
    replaced: Sequence[Swapped] = ()

    def put(self, *, deployed: bool) -> None:
        """Put the parts in their places, or what they were made of."""
        for one in self.replaced:
            one.owner._modules[one.name] = one.part if deployed else one.module


def rows_in_torch(skeleton: Skeleton, rows: Sequence[Row]) -> list[Row]:
    """The sparse weights that no part has."""
    known = {row.layer for row in rows}
    found = []
    for name, matrix in skeleton.matrices.items():
        layer = name.removesuffix(".weight")
        if layer not in known and name not in known:
            found.append(Row(layer, f"{matrix.rows}x{matrix.columns}", matrix.sparsity, None, None, "torch"))
    return found


def deploy_parts(
    skeleton: Skeleton,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    seconds: float,
    chosen: Mapping[str, Chosen],
    by_layer: bool = False,
    reasons: Sequence[str] = (),
) -> Found:
    """Replace parts of the skeleton's module, which is filled, as others may use what is inside of them."""
    fill_in(skeleton)
    module = skeleton.module
    inputs = _inputs(module, args, kwargs)
    walk = _Walk(skeleton, inputs, seconds / max(1, len(skeleton.matrices)), chosen, by_layer)
    walk.into(module, "")
    with torch.no_grad():
        module(*args, **kwargs)  # single layers are chosen when they see their first input
    single = [one.part for one in walk.replaced if isinstance(one.part, LinearPart)]
    rows = [*walk.rows, *(part.row for part in single if part.row is not None)]
    return Found(module, rows, [*reasons, *walk.in_torch], walk.replaced)


def _inputs(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
    """By the path of each module that is called, its first inputs."""
    found: Inputs = {}
    handles = []
    for path, part in module.named_modules():

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: str = path) -> None:
            found.setdefault(path, (args, kwargs))

        handles.append(part.register_forward_pre_hook(note, with_kwargs=True))
    try:
        with torch.no_grad():
            module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found


class _Walk:
    """Goes down a tree of modules until it finds what can be deployed."""

    def __init__(
        self, skeleton: Skeleton, inputs: Inputs, seconds: float, chosen: Mapping[str, Chosen], by_layer: bool
    ) -> None:
        self._skeleton, self._inputs, self._seconds = skeleton, inputs, seconds
        self._chosen, self._by_layer = chosen, by_layer
        self.rows: list[Row] = []
        self.in_torch: list[str] = []
        self.replaced: list[Replaced] = []

    def into(self, module: nn.Module, path: str) -> None:
        for name, child in list(module.named_children()):
            below = f"{path}.{name}" if path else name
            if not self._num_weights(below) or isinstance(child, (Part, LinearPart)):
                continue
            part = self._part(child, below)
            if part is None:
                self.into(child, below)
            else:
                module._modules[name] = part
                self.replaced.append(Replaced(module, name, part, child))

    def _num_weights(self, path: str) -> int:
        return sum(name.startswith(f"{path}.") for name in self._skeleton.matrices)

    def _part(self, module: nn.Module, path: str) -> nn.Module | None:
        if _is_linear(module) and f"{path}.weight" in self._skeleton.matrices and path in self._inputs:
            return LinearPart(module, path, self._skeleton, seconds=self._seconds, known=self._chosen.get(path))
        is_layer = f"{path}.weight" in self._skeleton.matrices
        if path not in self._inputs or (self._by_layer and not is_layer):
            return None
        part = Part(module, self._skeleton, seconds=self._seconds * self._num_weights(path), chosen=self._chosen)
        try:
            compiled = part.plan(*self._inputs[path])
        except NotTraceable as error:
            self.in_torch.append(f"{path} ({type(module).__name__}: {error})")
            return None
        self.rows += compiled.rows
        self.in_torch += compiled.in_torch
        return part if any(row.choice != "torch" for row in compiled.rows) else None


def _is_linear(module: nn.Module) -> bool:
    if does_more(module):  # which a part sees, and a single layer does not
        return False
    is_conv1d = any(kind.__name__ == "Conv1D" for kind in type(module).__mro__) and hasattr(module, "nf")
    return is_conv1d or (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward)
