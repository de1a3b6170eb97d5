"""The steps of a program: what each reads and writes, and how it is bound to memory.

A value is *stored*, at a fixed place of the arena, so that calls can be bound to it once; or *in a slot*, which an
operation of torch fills anew each time; or a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from growprune.deployment.fuse import Fused
from growprune.deployment.layer import Layer
from growprune.deployment.strides import Matrix, Strides


@dataclass(frozen=True)
class Stored:
    buffer: int
    place: Strides


@dataclass(frozen=True)
class InSlot:
    slot: int


Value: TypeAlias = Any
"""Stored, InSlot, a Tensor, or tuples, lists and plain values of these."""


class Memory:
    """The arena with its buffers, and the slots."""

    def __init__(self, arena: Tensor, offsets: list[int], num_slots: int) -> None:
        self.arena, self.offsets = arena, offsets
        self.slots: list[Any] = [None] * num_slots

    def tensor(self, value: Stored) -> Tensor:
        shape = value.place.torch
        assert shape is not None
        return self.arena.as_strided(*shape, self.offsets[value.buffer] + value.place.offset)

    def matrix(self, buffer: int, matrix: Matrix) -> Tensor:
        size, stride = (matrix.rows, matrix.columns), (matrix.step, 1)
        return self.arena.as_strided(size, stride, self.offsets[buffer] + matrix.offset)

    def owns(self, result: Any) -> bool:
        """Whether a tensor, or one of several, is a view of the arena."""
        if isinstance(result, (tuple, list)):
            return any(map(self.owns, result))
        if not isinstance(result, Tensor):
            return False
        return result.untyped_storage().data_ptr() == self.arena.untyped_storage().data_ptr()


class Step(Protocol):
    @property
    def reads(self) -> list[Value]: ...

    @property
    def writes(self) -> list[Stored]: ...

    def bind(self, memory: Memory) -> Callable[[], object]:
        """The step as a call with these tensors."""


@dataclass
class LayerStep:
    """A fused layer."""

    fused: Fused
    x: tuple[int, Matrix]
    out: tuple[int, Matrix]
    residual: tuple[int, Matrix] | None
    layer: Layer | None = None
    """What runs it, when that is chosen."""

    @property
    def reads(self) -> list[Value]:
        return [_place(matrix) for matrix in (self.x, self.residual) if matrix is not None]

    @property
    def writes(self) -> list[Stored]:
        return [_place(self.out)]

    def bind(self, memory: Memory) -> Callable[[], object]:
        assert self.layer is not None
        residual = None if self.residual is None else memory.matrix(*self.residual)
        return self.layer.bind(memory.matrix(*self.x), memory.matrix(*self.out), residual)


def _place(matrix: tuple[int, Matrix]) -> Stored:
    return Stored(matrix[0], Strides.contiguous((matrix[1].rows, matrix[1].columns)))


@dataclass
class CopyStep:
    """Put a value elsewhere, in another order."""

    source: Value
    target: Stored

    @property
    def reads(self) -> list[Value]:
        return [self.source]

    @property
    def writes(self) -> list[Stored]:
        return [self.target]

    def bind(self, memory: Memory) -> Callable[[], object]:
        if isinstance(self.source, Stored):
            atoms = [size for dimension in self.source.place.dimensions for size, _ in dimension]
            source, target = (_reshaped(value, atoms) for value in (self.source, self.target))
            from_tensor, to_tensor = memory.tensor(source), memory.tensor(target)
            return lambda: to_tensor.copy_(from_tensor)
        copy = _matrix_copy(memory.tensor(self.target))
        if isinstance(self.source, InSlot):
            slots, slot = memory.slots, self.source.slot
            return lambda: copy(slots[slot])
        tensor = self.source
        return lambda: copy(tensor)


def _reshaped(value: Stored, shape: list[int]) -> Stored:
    place = value.place.reshape(shape)
    assert place is not None
    return Stored(value.buffer, place)


def _matrix_copy(target: Tensor) -> Callable[[Tensor], object]:
    """A copy to features of tokens, as the transpose of a matrix, for which torch has a quick way."""
    is_tokens = target.dim() == 3 and target.stride(1) == 1 and target.stride(0) == target.shape[1]
    if not is_tokens:
        return target.copy_
    matrix = target.flatten(0, 1).t()
    return lambda source: matrix.copy_(source.reshape(matrix.shape[1], matrix.shape[0]).t())


@dataclass
class TorchStep:
    """An operation of torch, whose result is put into a slot, or written to a place by its variant that takes one."""

    function: Callable[..., Any]
    args: tuple[Value, ...]
    kwargs: dict[str, Value]
    slot: int | None
    out: Stored | None = None

    @property
    def reads(self) -> list[Value]:
        return [*leaves((self.args, self.kwargs))]

    @property
    def writes(self) -> list[Stored]:
        return [] if self.out is None else [self.out]

    def bind(self, memory: Memory) -> Callable[[], object]:
        args, kwargs = _bound(self.args, memory), _bound(self.kwargs, memory)
        function, slots, slot = self.function, memory.slots, self.slot
        if self.out is not None:
            kwargs = {**kwargs, "out": memory.tensor(self.out)}
        arguments = _arguments(args, kwargs, slots)
        if slot is None:

            def write() -> None:
                positional, named = arguments()
                function(*positional, **named)

            return write
        if not any(isinstance(leaf, Stored) for leaf in self.reads):

            def run() -> None:
                positional, named = arguments()
                slots[slot] = function(*positional, **named)

            return run
        return _Guarded(function, arguments, memory, slot)


class _Guarded:
    """An operation that reads the arena. Should its result be a view of it, that is copied before it is overwritten."""

    def __init__(self, function: Any, arguments: Any, memory: Memory, slot: int) -> None:
        self._function, self._arguments, self._memory, self._slot = function, arguments, memory, slot
        self._copies: bool | None = None

    def __call__(self) -> None:
        positional, named = self._arguments()
        result = self._function(*positional, **named)
        if self._copies is None:
            self._copies = self._memory.owns(result)
        self._memory.slots[self._slot] = _cloned(result) if self._copies else result


def _cloned(result: Any) -> Any:
    return [t.clone() for t in result] if isinstance(result, (tuple, list)) else result.clone()


def leaves(value: Value) -> Iterator[Value]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def _bound(value: Value, memory: Memory) -> Value:
    if isinstance(value, Stored):
        return memory.tensor(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_bound(item, memory) for item in value)
    if isinstance(value, dict):
        return {key: _bound(item, memory) for key, item in value.items()}
    return value


def _arguments(args: Any, kwargs: Any, slots: list[Any]) -> Callable[[], tuple[Any, Any]]:
    if not any(isinstance(leaf, InSlot) for leaf in leaves((args, kwargs))):
        return lambda: (args, kwargs)
    return lambda: (_filled(args, slots), _filled(kwargs, slots))


def _filled(value: Any, slots: list[Any]) -> Any:
    if isinstance(value, InSlot):
        return slots[value.slot]
    if isinstance(value, (tuple, list)):
        return [_filled(item, slots) for item in value]
    if isinstance(value, dict):
        return {key: _filled(item, slots) for key, item in value.items()}
    return value


@dataclass
class CallStep:
    """A function that is made of stored tensors (and constants), and called with what is in slots."""

    make: Callable[..., Callable[..., object]]
    inputs: list[Stored]
    outputs: list[Stored]
    in_slots: list[InSlot] = field(default_factory=list)

    @property
    def reads(self) -> list[Value]:
        return [*self.inputs, *self.in_slots]

    @property
    def writes(self) -> list[Stored]:
        return self.outputs

    def bind(self, memory: Memory) -> Callable[[], object]:
        call = self.make(*(memory.tensor(value) for value in (*self.inputs, *self.outputs)))
        slots, in_slots = memory.slots, [value.slot for value in self.in_slots]
        return (lambda: call(*(slots[slot] for slot in in_slots))) if in_slots else call
