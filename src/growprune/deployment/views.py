"""Operations that only look at a stored value otherwise: no step is needed for them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from growprune.deployment.steps import Stored, Value
from growprune.deployment.strides import Strides
from growprune.deployment.trace import VIEWS as ALL
from growprune.deployment.trace import aten

__all__ = ["ALL", "reshaped", "view"]

PERMUTES = (aten.transpose.int, aten.permute.default, aten.t.default)
RESHAPES = {
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints),
    *(aten.unflatten.int, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default),
}


def view(node: fx.Node, value_of: Callable[[Any], Value]) -> Value | None:
    """What a node makes of a stored value without moving it; None if it is something else, or cannot be done so."""
    if node.target not in ALL or not isinstance(node.args[0], fx.Node):
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


def reshaped(place: Strides, target: Any, arguments: Sequence[Any], shape: Sequence[int]) -> Strides | None:
    """A place seen through one of the operations that keep every number."""
    if target in RESHAPES:
        return place.reshape(shape)
    rank = len(place.dimensions)
    order = list(range(rank))
    if target is aten.t.default:
        order.reverse()
    elif target is aten.transpose.int:
        first, second = (int(axis) % rank for axis in arguments)
        order[first], order[second] = second, first
    else:
        order = [int(axis) % rank for axis in arguments[0]]
    return place.permute(order)


def _place(place: Strides, node: fx.Node) -> Strides | None:
    shape, rest = tuple(node.meta["val"].shape), node.args[1:]
    if node.target in RESHAPES or node.target in PERMUTES:
        return reshaped(place, node.target, rest, shape)
    if node.target is aten.expand.default:
        return place.expand(shape)
    if node.target is aten.select.int:
        axis, index = (int(n) for n in rest)  # type: ignore[arg-type]
        axis %= len(place.shape)
        found = _select(place, axis, index % place.shape[axis])
        return None if found is None else found.reshape(shape)
    if node.target is aten.slice.Tensor:
        cut: list[Any] = [*rest, None, None, None, None]
        along, begin, step = int(cut[0] or 0) % len(place.shape), int(cut[1] or 0), cut[3]
        begin = max(0, begin + place.shape[along] if begin < 0 else begin)
        return None if step not in (None, 1) else place.narrow(along, begin, shape[along])
    return None


def _select(place: Strides, axis: int, index: int) -> Strides | None:
    """One of a dimension, of however many atoms."""
    offset, dimensions = place.offset, list(place.dimensions)
    for size, stride in reversed(dimensions[axis]):
        index, digit = divmod(index, size)
        offset += digit * stride
    dimensions[axis] = ()
    return Strides(tuple(dimensions), offset)


def _places(place: Strides, node: fx.Node) -> list[Strides] | None:
    """Of an operation that cuts a tensor into several."""
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
