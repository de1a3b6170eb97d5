"""Turn a graph into steps: choose the layout of each value, and the steps that compute it.

Activations of layers are feature-major. The operations of operations.py work on this layout and keep it. All other
operations run in torch, which takes stored values as tensors with unusual strides. Their results are copied to the
feature-major layout only if a layer needs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from growprune.deployment.graph.fuse import Fused, layer
from growprune.deployment.graph.places import (
    InSlot,
    Stored,
    Strides,
    Value,
    as_matrix,
    feature_major,
    reshaped,
    view,
    with_features,
)
from growprune.deployment.graph.program import CopyStep, LayerStep, Lowered, Step, TorchStep, mapped
from growprune.deployment.graph.trace import VIEWS, NotTraceable, Traced, aten, constant, is_constant

SAFE: dict[Any, Any] = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}
"""Replacements for operations that need the same strides as in the trace."""


class Lowering:
    def __init__(self, traced: Traced, known: dict[Any, Callable[[Lowering, fx.Node], Value | None]]) -> None:
        self.traced, self.known, self.done = traced, known, Lowered()
        self.values: dict[fx.Node, Value] = {}

    def run(self) -> Lowered:
        for node in self.traced.inputs:
            self.values[node] = self.hold()
            self.done.inputs.append(self.values[node].slot)
        for node in self.traced.graph.nodes:
            if node.op == "call_function" and not is_constant(node):
                self.values[node] = self._lower(node)
        output = next(iter(reversed(self.traced.graph.nodes)))
        self.done.outputs = [mapped(self.value(leaf), self.as_torch) for leaf in output.args[0]]
        return self.done

    def _lower(self, node: fx.Node) -> Value:
        if node.target is layer:
            return self._layer(node)
        if (found := view(node, self.value)) is not None:
            return found
        known = self.known.get(node.target)
        if known is not None and (found := known(self, node)) is not None:
            return found
        return self._in_torch(node)

    def value(self, argument: Any) -> Value:
        """Return the value of an argument of a node."""
        if not isinstance(argument, fx.Node):
            return argument
        return constant(argument) if is_constant(argument) else self.values[argument]

    def stored(self, argument: Any) -> Stored | None:
        value = self.value(argument)
        return value if isinstance(value, Stored) else None

    # New places

    def store(self, place: Strides) -> Stored:
        """Return a new buffer for a dense tensor with this layout."""
        self.done.sizes.append(math.prod(place.shape))
        return Stored(len(self.done.sizes) - 1, place)

    def hold(self) -> InSlot:
        self.done.num_slots += 1
        return InSlot(self.done.num_slots - 1)

    def add(self, step: Step) -> None:
        self.done.steps.append(step)

    def copy(self, value: Value, place: Strides) -> Stored:
        target = self.store(place)
        self.add(CopyStep(value, target))
        return target

    def as_torch(self, value: Value) -> Value:
        """Return the value, copied if a torch tensor cannot have its layout."""
        is_odd = isinstance(value, Stored) and value.place.torch is None
        return self.copy(value, Strides.contiguous(value.place.shape)) if is_odd else value

    def arguments_in_torch(self, node: fx.Node) -> tuple[tuple[Value, ...], dict[str, Value]]:
        """Return the arguments of a node, copied where a torch tensor cannot have their layout."""
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.value)
        return tuple(mapped(args, self.as_torch)), dict(mapped(kwargs, self.as_torch))

    # Layers

    def features(self, node: fx.Node, axis: int, *, ordered: bool = False) -> tuple[Stored, Stored]:
        """Return a node's value, and its feature matrix. If there is no such view, the value becomes a copy first."""
        value = self.value(node)
        matrix = as_matrix(value.place, axis, ordered=ordered) if isinstance(value, Stored) else None
        if matrix is None:
            value = self.copy(value, feature_major(node.meta["val"].shape, axis))
            if not is_constant(node):
                self.values[node] = value
            matrix = as_matrix(value.place, axis, ordered=ordered)
            assert matrix is not None
        return value, Stored(value.buffer, matrix)

    def _layer(self, node: fx.Node) -> Stored:
        fused: Fused = node.meta["fused"]
        source, residual = node.args
        assert isinstance(source, fx.Node)
        is_image = fused.is_image
        x, matrix = self.features(source, fused.axis, ordered=is_image)
        if is_image:
            place = feature_major((x.place.shape[0], fused.weight.rows, *fused.geometry.out_size), 1)
        else:
            place = with_features(x.place, fused.axis, fused.weight.rows)
        rows = Strides.contiguous((fused.weight.rows, fused.geometry.columns))
        middle, added = self._reshape(place, fused.before), None
        if isinstance(residual, fx.Node):
            lies_alike = self._alike(residual, middle)
            added = Stored(lies_alike.buffer, Strides(rows.dimensions, lies_alike.place.offset))
        out = self.store(place)
        self.add(LayerStep(fused, matrix, Stored(out.buffer, rows), added))
        return Stored(out.buffer, self._reshape(middle, fused.after))

    def _reshape(self, place: Strides, nodes: Sequence[fx.Node]) -> Strides:
        for node in nodes:
            found = reshaped(place, node)
            if found is None:
                raise NotTraceable(f"{node.target} regroups features and columns unevenly")
            place = found
        return place

    def _alike(self, node: fx.Node, place: Strides) -> Stored:
        """Return a node's value in the layout of `place`, copied if necessary."""
        value = self.value(node)
        if isinstance(value, Stored) and value.place.canonical == place.canonical:
            return value
        return self.copy(value, Strides(place.dimensions))

    # Everything else

    def _in_torch(self, node: fx.Node) -> InSlot:
        arguments = self.arguments_in_torch(node)
        slot = self.hold()
        self.add(TorchStep(SAFE.get(node.target, node.target), *arguments, slot.slot, size=largest(node)))
        if isinstance(node.target, torch._ops.OpOverload) and node.target not in VIEWS:
            self.done.in_torch.append(str(node.target).removeprefix("aten.").rpartition(".")[0])
        return slot


def largest(node: fx.Node) -> int:
    """Return the size of the largest tensor that an operation reads or creates, or 0 for a view."""
    if node.target in VIEWS:
        return 0
    tensors = pytree.tree_leaves([n.meta.get("val") for n in (node, *node.all_input_nodes)])
    return max((tensor.numel() for tensor in tensors if isinstance(tensor, Tensor)), default=0)
