"""A program: steps bound to memory, which run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from growprune.deployment.arena import assign, lifetimes
from growprune.deployment.lower import Lowered
from growprune.deployment.steps import InSlot, Memory, Stored


class Program:
    """What a module does with inputs of one shape. One call at a time: its memory is its own."""

    def __init__(self, lowered: Lowered, out_spec: pytree.TreeSpec) -> None:
        spans = lifetimes(lowered.steps, len(lowered.sizes), lowered.outputs)
        offsets, size = assign(lowered.sizes, spans)
        self._memory = Memory(torch.zeros(max(1, size)), offsets, lowered.num_slots)
        self._calls = [step.bind(self._memory) for step in lowered.steps]
        self._inputs, self._out_spec = lowered.inputs, out_spec
        self._outputs = [_output(value, self._memory) for value in lowered.outputs]
        self.num_bytes = 4 * size
        """What its buffers take."""

    def __call__(self, leaves: Sequence[Any]) -> Any:
        slots = self._memory.slots
        for slot, leaf in zip(self._inputs, leaves, strict=True):
            slots[slot] = leaf
        for call in self._calls:
            call()
        found = [output() for output in self._outputs]
        slots[:] = [None] * len(slots)
        return pytree.tree_unflatten(found, self._out_spec)


def _output(value: Any, memory: Memory) -> Callable[[], Any]:
    if isinstance(value, Stored):
        tensor = memory.tensor(value)
        return lambda: tensor.clone(memory_format=torch.contiguous_format)
    if isinstance(value, InSlot):
        slots, slot = memory.slots, value.slot
        return lambda: slots[slot]
    return (lambda: value.clone()) if isinstance(value, Tensor) else lambda: value
