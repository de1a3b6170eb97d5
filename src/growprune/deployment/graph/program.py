"""A program: steps that run one after the other, bound to one piece of memory.

This memory is the *arena*. Values that are not needed at the same time may use the same part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from growprune.deployment.cpu.library import Library, library
from growprune.deployment.cpu.prepared import DenseLayer, Layer, LayerCalls
from growprune.deployment.graph.fuse import Fused
from growprune.deployment.graph.places import InSlot, Stored, Value

LITTLE = 1 << 19
"""The most numbers that torch may process in a program that runs on our own threads."""
ALIGNMENT = 16
"""Buffers begin at multiples of this number of floats, where cache lines begin."""


class Memory:
    """The arena with its buffers, and the slots."""

    def __init__(self, arena: Tensor, offsets: list[int], num_slots: int) -> None:
        self.arena, self.offsets = arena, offsets
        self.slots: list[Any] = [None] * num_slots

    def tensor(self, value: Stored) -> Tensor:
        shape = value.place.torch
        assert shape is not None
        return self.arena.as_strided(*shape, self.offsets[value.buffer] + value.place.offset)

    def bound(self, value: Value) -> Value:
        return self.tensor(value) if isinstance(value, Stored) else value

    def filled(self, value: Value) -> Value:
        return self.slots[value.slot] if isinstance(value, InSlot) else value

    def owns(self, result: Any) -> bool:
        """True if a tensor, or one of several, is a view of the arena."""
        start = self.arena.untyped_storage().data_ptr()
        return any(
            isinstance(x, Tensor) and x.untyped_storage().data_ptr() == start for x in pytree.tree_leaves(result)
        )


@dataclass
class LayerStep:
    """Run a fused layer on matrices."""

    fused: Fused
    x: Stored
    out: Stored
    residual: Stored | None
    layer: Layer | None = None
    """The layer that runs this step, once it is chosen."""

    def bind(self, memory: Memory) -> Callable[[], object]:
        assert self.layer is not None
        residual = None if self.residual is None else memory.tensor(self.residual)
        return self.layer.bind(memory.tensor(self.x), memory.tensor(self.out), residual)


@dataclass
class CopyStep:
    """Copy a value to another place and layout."""

    source: Value
    target: Stored

    def bind(self, memory: Memory) -> Callable[[], object]:
        if isinstance(self.source, Stored):
            atoms = [size for dimension in self.source.place.dimensions for size, _ in dimension]
            places = [value.place.reshape(atoms) for value in (self.source, self.target)]
            assert places[0] is not None and places[1] is not None
            from_tensor = memory.tensor(Stored(self.source.buffer, places[0]))
            to_tensor = memory.tensor(Stored(self.target.buffer, places[1]))
            return lambda: to_tensor.copy_(from_tensor)
        target = memory.tensor(self.target)
        is_tokens = target.dim() == 3 and target.stride(1) == 1 and target.stride(0) == target.shape[1]
        if not is_tokens:
            return lambda: target.copy_(memory.filled(self.source))
        matrix = target.flatten(0, 1).t()  # torch transposes matrices quickly
        return lambda: matrix.copy_(memory.filled(self.source).reshape(matrix.shape[1], matrix.shape[0]).t())


@dataclass
class TorchStep:
    """Run an operation of torch, and put its result into a slot, or write it to a place with its `out` variant."""

    function: Callable[..., Any]
    args: tuple[Value, ...]
    kwargs: dict[str, Value]
    slot: int | None
    out: Stored | None = None
    size: int = 0
    """The size of the largest of its tensors."""

    def bind(self, memory: Memory) -> Callable[[], object]:
        function, slots, slot = self.function, memory.slots, self.slot
        args, kwargs = mapped((self.args, self.kwargs), memory.bound)
        if self.out is not None:
            kwargs = {**kwargs, "out": memory.tensor(self.out)}
        given = pytree.tree_leaves((self.args, self.kwargs))
        has_slots = any(isinstance(leaf, InSlot) for leaf in given)
        copies = None if any(isinstance(leaf, Stored) for leaf in given) else False  # None: the first result tells

        def run() -> Any:
            positional, named = mapped((args, kwargs), memory.filled) if has_slots else (args, kwargs)
            return function(*positional, **named)

        def to_slot() -> None:
            nonlocal copies
            result = run()
            if copies is None:
                copies = memory.owns(result)
            if copies:  # a view of the arena, which later steps overwrite
                result = [t.clone() for t in result] if isinstance(result, (tuple, list)) else result.clone()
            slots[slot] = result  # type: ignore[index]

        return run if slot is None else to_slot


def mapped(value: Value, change: Callable[[Value], Value]) -> Value:
    """Apply `change` to each leaf of a value, inside tuples, lists and dicts."""
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    return change(value)


@dataclass
class CallStep:
    """Call a function that was made from stored tensors (and constants) with the values in slots."""

    make: Callable[..., Callable[..., object]]
    inputs: list[Stored]
    outputs: list[Stored]
    in_slots: list[InSlot] = field(default_factory=list)
    is_ours: bool = False
    """True if it runs on our kernels."""

    def bind(self, memory: Memory) -> Callable[[], object]:
        call = self.make(*(memory.tensor(value) for value in (*self.inputs, *self.outputs)))
        slots, in_slots = memory.slots, [value.slot for value in self.in_slots]
        return (lambda: call(*(slots[slot] for slot in in_slots))) if in_slots else call


Step = LayerStep | CopyStep | TorchStep | CallStep
"""Steps are bound to memory before they run. They read or write every `Stored` in their fields."""


@dataclass
class Lowered:
    """Steps, not yet bound to memory."""

    steps: list[Step] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """The sizes of the buffers, in floats."""
    num_slots: int = 0
    inputs: list[int] = field(default_factory=list)
    """The slots of the leaves of the input."""
    outputs: list[Value] = field(default_factory=list)
    in_torch: list[str] = field(default_factory=list)
    """Operations that run in torch, in order."""

    @property
    def layers(self) -> list[LayerStep]:
        return [step for step in self.steps if isinstance(step, LayerStep)]


class Program:
    """The steps of a module for inputs of one shape. Only one call may run at a time, because calls share memory."""

    def __init__(self, lowered: Lowered, out_spec: pytree.TreeSpec) -> None:
        spans = lifetimes(lowered.steps, len(lowered.sizes), lowered.outputs)
        offsets, size = assign(lowered.sizes, spans)
        self._memory = Memory(torch.zeros(max(1, size)), offsets, lowered.num_slots)
        self._calls = LayerCalls.joined(step.bind(self._memory) for step in lowered.steps)
        self._inputs, self._out_spec = lowered.inputs, out_spec
        self._outputs = [_output(value, self._memory) for value in lowered.outputs]
        self._alone: Library | None = library() if is_ours(lowered.steps) else None
        """The library if the steps run on our own threads (see native/threads.h), or None if they run on torch's."""

    def __call__(self, leaves: Sequence[Any]) -> Any:
        slots, threads = self._memory.slots, None
        for slot, leaf in zip(self._inputs, leaves, strict=True):
            slots[slot] = leaf
        try:
            if self._alone is not None:
                threads = self._alone.begin_alone()
            for call in self._calls:
                call()
        finally:
            if self._alone is not None and threads is not None:
                self._alone.end_alone(threads)
        found = [output() for output in self._outputs]
        slots[:] = [None] * len(slots)
        return pytree.tree_unflatten(found, self._out_spec)


def is_ours(steps: Sequence[Step]) -> bool:
    """True if torch computes so little that it needs no threads."""
    in_torch = 0
    for step in steps:
        if isinstance(step, TorchStep):
            in_torch += step.size
        if isinstance(step, LayerStep) and isinstance(step.layer, DenseLayer):
            return False
        if isinstance(step, CallStep) and not step.is_ours:
            return False
    return in_torch <= LITTLE


def _output(value: Any, memory: Memory) -> Callable[[], Any]:
    if isinstance(value, Stored):
        tensor = memory.tensor(value)
        return lambda: tensor.clone(memory_format=torch.contiguous_format)
    if isinstance(value, InSlot):
        slots, slot = memory.slots, value.slot
        return lambda: slots[slot]
    return (lambda: value.clone()) if isinstance(value, Tensor) else lambda: value


def lifetimes(steps: Sequence[Step], num_buffers: int, kept: Sequence[object]) -> list[tuple[int, int]]:
    """Return the first and the last step that touches each buffer. What is `kept` is read after the last step."""
    first, last = [len(steps)] * num_buffers, [-1] * num_buffers
    for i, step in enumerate(steps):
        for value in pytree.tree_leaves(vars(step)):
            if isinstance(value, Stored):
                first[value.buffer], last[value.buffer] = min(first[value.buffer], i), i
    for value in pytree.tree_leaves(list(kept)):
        if isinstance(value, Stored):
            last[value.buffer] = len(steps)
    return [*zip(first, last, strict=True)]


def assign(sizes: Sequence[int], spans: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Return where each buffer begins, and how long the arena is. The largest buffers are placed first.

    >>> assign([16, 32, 16], [(0, 1), (1, 2), (2, 3)])
    ([32, 0, 32], 48)
    """
    offsets, placed = [0] * len(sizes), list[int]()
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = 0
        for j in sorted(placed, key=lambda j: offsets[j]):
            meets = spans[i][0] <= spans[j][1] and spans[j][0] <= spans[i][1]
            if meets and offsets[j] < at + sizes[i] and at < offsets[j] + sizes[j]:
                at = -(-(offsets[j] + sizes[j]) // ALIGNMENT) * ALIGNMENT
        offsets[i] = at
        placed.append(i)
    return offsets, max((offset + size for offset, size in zip(offsets, sizes, strict=True)), default=0)
