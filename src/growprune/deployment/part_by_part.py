"""A model that cannot be deployed as a whole: the largest parts that can be, and single layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from growprune.deployment.deployed import Replaced, Swapped
from growprune.deployment.example import Example
from growprune.deployment.graph.trace import NotTraceable
from growprune.deployment.layer_table import Row
from growprune.deployment.parts import LinearPart, Part
from growprune.deployment.skeleton import Skeleton, does_more, fill_in


def deploy_parts(
    skeleton: Skeleton,
    example: Example,
    *,
    seconds: float,
    known: Mapping[str, Row],
    by_layer: bool = False,
    reasons: Sequence[str] = (),
) -> Swapped:
    """Replace parts of the skeleton's module, which is filled, as others may use what is inside of them."""
    fill_in(skeleton)
    module = skeleton.module
    inputs = _inputs(module, example)
    walk = _Walk(skeleton, inputs, seconds / max(1, len(skeleton.matrices)), known, by_layer)
    walk.into(module, "")
    example.call(module)  # single layers are chosen when they see their first input
    single = [one.part for one in walk.replaced if isinstance(one.part, LinearPart)]
    rows = [*walk.rows, *(part.row for part in single if part.row is not None)]
    return Swapped(module, rows, [*reasons, *walk.in_torch], walk.replaced)


def _inputs(module: nn.Module, example: Example) -> dict[str, Example]:
    """By the path of each module that is called, its first inputs."""
    found: dict[str, Example] = {}
    handles = []
    for path, part in module.named_modules():

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: str = path) -> None:
            found.setdefault(path, Example(args, kwargs))

        handles.append(part.register_forward_pre_hook(note, with_kwargs=True))
    try:
        example.call(module)
    finally:
        for handle in handles:
            handle.remove()
    return found


class _Walk:
    """Goes down a tree of modules until it finds what can be deployed."""

    def __init__(
        self, skeleton: Skeleton, inputs: dict[str, Example], seconds: float, known: Mapping[str, Row], by_layer: bool
    ) -> None:
        self._skeleton, self._inputs, self._seconds = skeleton, inputs, seconds
        self._known, self._by_layer = known, by_layer
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
                self.replaced.append(Replaced(module, name, part, partial(_itself, child)))

    def _num_weights(self, path: str) -> int:
        return sum(name.startswith(f"{path}.") for name in self._skeleton.matrices)

    def _part(self, module: nn.Module, path: str) -> nn.Module | None:
        is_layer = f"{path}.weight" in self._skeleton.matrices
        if path not in self._inputs or (self._by_layer and not is_layer):
            return None
        if is_layer and _is_linear(module):
            return LinearPart(module, path, self._skeleton, seconds=self._seconds, known=self._known.get(path))
        part = Part(module, self._skeleton, seconds=self._seconds * self._num_weights(path), known=self._known)
        try:
            planned = part.plan(self._inputs[path])
        except NotTraceable as error:
            self.in_torch.append(f"{path} ({type(module).__name__}: {error})")
            return None
        self.rows += planned.rows
        self.in_torch += planned.in_torch
        return part if any(row.choice != "torch" for row in planned.rows) else None


def _itself(module: nn.Module) -> nn.Module:
    return module


def _is_linear(module: nn.Module) -> bool:
    if does_more(module):  # which a part sees, and a single layer does not
        return False
    is_conv1d = any(kind.__name__ == "Conv1D" for kind in type(module).__mro__) and hasattr(module, "nf")
    return is_conv1d or (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward)
