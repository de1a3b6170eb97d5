"""Layouts of tensors in memory, described so finely that reshapes and permutations need no copy, and views of them.

A dimension is a product of *atoms*, (size, stride) from the outermost to the innermost. Splitting heads off features
and merging them with the batch, as attention does, only regroups atoms. A tensor of torch has only one stride for each
dimension, so it would have to be copied.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import Tensor, fx

from growprune.deployment.graph.trace import PERMUTES, RESHAPES, VIEWS, aten

Atom = tuple[int, int]
Dimension = tuple[Atom, ...]


@dataclass(frozen=True)
class Strides:
    """The layout of a tensor in a buffer."""

    dimensions: tuple[Dimension, ...]
    offset: int = 0

    @classmethod
    def contiguous(cls, shape: Sequence[int]) -> Strides:
        """Return the layout of a contiguous tensor.

        >>> Strides.contiguous((2, 3)).torch
        ((2, 3), (3, 1))
        """
        return cls.ordered(shape, range(len(shape)))

    @classmethod
    def ordered(cls, shape: Sequence[int], order: Sequence[int]) -> Strides:
        """Return a dense layout with the dimensions in this order in memory, the outermost first."""
        strides, step = [0] * len(shape), 1
        for axis in reversed(order):
            strides[axis], step = step, step * shape[axis]
        return cls(tuple(_atoms(pair) for pair in zip(shape, strides, strict=True)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(size for size, _ in atoms) for atoms in self.dimensions)

    @property
    def torch(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Sizes and strides for torch, or None if a torch tensor cannot have this layout."""
        merged = [_merged(atoms) for atoms in self.dimensions]
        if any(len(atoms) > 1 for atoms in merged):
            return None
        return self.shape, tuple(atoms[0][1] if atoms else 1 for atoms in merged)

    @property
    def canonical(self) -> tuple[Dimension, ...]:
        """The dimensions with as few atoms as possible, so that equal layouts compare equal."""
        return tuple(_merged(atoms) for atoms in self.dimensions)

    def reshape(self, shape: Sequence[int]) -> Strides | None:
        """Return the layout in another shape, or None if an atom would be divided unevenly."""
        atoms = [atom for dimension in self.dimensions for atom in dimension]
        found: list[Dimension] = []
        for size in shape:
            taken: list[Atom] = []
            while size > 1:
                if not atoms:
                    return None
                (length, stride), *atoms = atoms
                if size % length and length % size:
                    return None
                if length > size:
                    inner = length // size
                    atoms = [(inner, stride), *atoms]
                    length, stride = size, stride * inner
                taken.append((length, stride))
                size //= length
            found.append(tuple(taken))
        return None if atoms else replace(self, dimensions=tuple(found))

    def permute(self, order: Sequence[int]) -> Strides:
        return replace(self, dimensions=tuple(self.dimensions[axis] for axis in order))

    def narrow(self, axis: int, start: int, length: int) -> Strides | None:
        """Return the layout of a part of a dimension, or None if the dimension has several atoms."""
        merged = _merged(self.dimensions[axis])
        if length == self.shape[axis]:
            return self
        if len(merged) != 1:
            return None
        (_, stride) = merged[0]
        dimensions = list(self.dimensions)
        dimensions[axis] = _atoms((length, stride))
        return Strides(tuple(dimensions), self.offset + start * stride)

    def expand(self, shape: Sequence[int]) -> Strides:
        """Repeat dimensions of size 1, and put new ones in front."""
        missing = len(shape) - len(self.dimensions)
        own = ((),) * missing + self.dimensions
        sizes = (1,) * missing + self.shape
        dimensions = tuple(
            ((size, 0),) if had == 1 and size > 1 else atoms for size, had, atoms in zip(shape, sizes, own, strict=True)
        )
        return replace(self, dimensions=dimensions)


def _atoms(pair: Atom) -> Dimension:
    return (pair,) if pair[0] != 1 else ()


def _merged(atoms: Dimension) -> Dimension:
    """Join neighbouring atoms that one atom can describe."""
    found: list[Atom] = []
    for size, stride in atoms:
        if found and found[-1][1] == size * stride:
            size *= found.pop()[0]
        found.append((size, stride))
    return tuple(found)


def as_matrix(place: Strides, axis: int, *, ordered: bool = False) -> Strides | None:
    """Return the layout as a matrix with a row for each feature of `axis`, or None if it is not such a matrix.

    All other dimensions are its columns, in any order; with `ordered`, in the order of the tensor.
    """
    features = _merged(place.dimensions[axis])
    others = [atom for i, atoms in enumerate(place.dimensions) if i != axis for atom in atoms]
    columns = 1
    for size, stride in reversed(others if ordered else sorted(others, key=lambda atom: -atom[1])):
        if stride != columns:  # there is a gap
            return None
        columns *= size
    if len(features) > 1 or any(stride < columns for _, stride in features):
        return None
    return Strides((features, _atoms((columns, 1))), place.offset)


def with_features(place: Strides, axis: int, rows: int) -> Strides:
    """Return the layout of a layer's output for an input with layout `place`: the same columns, other rows, no gaps."""
    others = math.prod(size for i, size in enumerate(place.shape) if i != axis)
    dimensions = list(place.dimensions)
    dimensions[axis] = _atoms((rows, others))
    return Strides(tuple(dimensions))


def feature_major(shape: Sequence[int], axis: int) -> Strides:
    """Return a dense layout with a row for each feature, and the other dimensions in their order.

    >>> feature_major((2, 3, 4), 2).torch
    ((2, 3, 4), (3, 1, 6))
    """
    axis %= len(shape)
    return Strides.ordered(shape, [axis, *(i for i in range(len(shape)) if i != axis)])


# Values


@dataclass(frozen=True)
class Stored:
    """A value at a fixed place of the arena, so that calls can be bound to it once."""

    buffer: int
    place: Strides


def as_rows(value: Stored, axis: int, *, ordered: bool = False) -> Stored:
    """Return a value as a matrix with a row for each feature of `axis`."""
    matrix = as_matrix(value.place, axis, ordered=ordered)
    assert matrix is not None
    return Stored(value.buffer, matrix)


@dataclass(frozen=True)
class InSlot:
    """A value that is another tensor in each call: an input, or the result of an operation of torch."""

    slot: int


Value: TypeAlias = Any
"""Stored, InSlot, a Tensor (a constant), or tuples, lists and plain values of these."""


def view(node: fx.Node, value_of: Callable[[Any], Value]) -> Value | None:
    """Return the result of a node that is a view of a stored value and needs no step, or None for other nodes."""
    if node.target not in VIEWS or not isinstance(node.args[0], fx.Node):
        return None
    value = value_of(node.args[0])
    if node.target is operator.getitem:
        return value[int(node.args[1])] if isinstance(value, tuple) else None  # type: ignore[arg-type]
    if not isinstance(value, Stored):
        return None
    if isinstance(node.meta["val"], Tensor):
        place = _place(value.place, node)
        return None if place is None else Stored(value.buffer, place)
    places = _places(value.place, node)
    return None if places is None else tuple(Stored(value.buffer, place) for place in places)


def reshaped(place: Strides, node: fx.Node) -> Strides | None:
    """Return a layout after a reshape or permutation, or None if it would need a copy."""
    if node.target in RESHAPES:
        return place.reshape(node.meta["val"].shape)
    rank, rest = len(place.dimensions), node.args[1:]
    order: Any = list(range(rank))
    if node.target is aten.t.default:
        order.reverse()
    elif node.target is aten.transpose.int:
        first, second = (int(axis) % rank for axis in rest)  # type: ignore[arg-type]
        order[first], order[second] = second, first
    else:
        order = [axis % rank for axis in rest[0]]  # type: ignore[operator, union-attr]
    return place.permute(order)


def _place(place: Strides, node: fx.Node) -> Strides | None:
    shape, rest = tuple(node.meta["val"].shape), node.args[1:]
    if node.target in RESHAPES or node.target in PERMUTES:
        return reshaped(place, node)
    if node.target is aten.expand.default:
        return place.expand(shape)
    if node.target is aten.select.int:
        axis, index = (int(n) for n in rest)  # type: ignore[arg-type]
        axis %= len(place.shape)
        index, offset, dimensions = index % place.shape[axis], place.offset, list(place.dimensions)
        for size, stride in reversed(dimensions[axis]):
            index, digit = divmod(index, size)
            offset += digit * stride
        dimensions[axis] = ()
        return Strides(tuple(dimensions), offset).reshape(shape)
    if node.target is aten.slice.Tensor:
        cut: list[Any] = [*rest, None, None, None, None]
        along, begin, step = int(cut[0] or 0) % len(place.shape), int(cut[1] or 0), cut[3]
        begin = max(0, begin + place.shape[along] if begin < 0 else begin)
        return None if step not in (None, 1) else place.narrow(along, begin, shape[along])
    return None


def _places(place: Strides, node: fx.Node) -> list[Strides] | None:
    """Return the layouts of the results of an operation that splits a tensor, or None if they need copies."""
    if node.target is aten.unbind.int:
        return None
    axis = int(node.args[2]) if len(node.args) > 2 else int(node.kwargs.get("dim", 0))  # type: ignore[arg-type]
    axis %= len(place.shape)
    found, start = [], 0
    for part in node.meta["val"]:
        length = part.shape[axis]
        piece = place.narrow(axis, start, length)
        if piece is None:
            return None
        found.append(piece)
        start += length
    return found
