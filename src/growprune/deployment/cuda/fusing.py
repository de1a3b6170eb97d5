"""Layers that read the same tensor, such as q, k and v, computed as one product: fewer kernels, and larger ones.

Which layers these are, the example shows. Their matrices are laid one behind the other, and each layer keeps a view of
its own: weights are held once, and every layer can still compute its part alone. The layer that comes first in the
example computes all parts. The others take theirs if they are called with the very same tensor, unchanged.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from growprune.deployment.cuda.formats import LaneMatrix
from growprune.deployment.cuda.linear import FEW_ROUNDS, DenseLinear, SparseLinear
from growprune.deployment.cuda.products import MOST_SAMPLES, Matrix
from growprune.deployment.cuda.tuning import TILES, check, fastest, time_layer

MOST_VALUES = 1 << 31
"""Of a matrix: where its values begin is said in 32 bits."""
Moment = tuple[int, ...]


def moment(x: Tensor) -> Moment | None:
    """Equal in two calls if torch has not changed x between them, on one stream; None where nobody can know.

    A CUDA graph must not take what was computed before it: it would be the same in every replay.
    """
    if torch.compiler.is_compiling() or x.is_inference() or (x.requires_grad and torch.is_grad_enabled()):
        return None
    if not x.is_cuda:
        return (x._version,)
    return x._version, torch._C._cuda_getCurrentRawStream(x.get_device()), torch.cuda.is_current_stream_capturing()


class Readers:
    """Groups of layers that are called with the same tensor one after the other, by their first calls."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []
        self._known: set[str] = set()
        self._last: tuple[weakref.ref[Tensor], Moment | None] | None = None

    def note(self, path: str, x: Tensor) -> None:
        """Take note of a call."""
        now, before, self._last = moment(x), self._last, None
        if path in self._known:
            return
        self._known.add(path)
        if now is None or before is None or before[0]() is not x or before[1] != now:
            self.groups.append([])
        self.groups[-1].append(path)
        self._last = weakref.ref(x), now


def alike(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, SparseLinear]]:
    """Those that one matrix can hold, two or more at a time."""
    found: dict[object, dict[str, SparseLinear]] = defaultdict(dict)
    for path, layer in layers.items():
        if isinstance(layer, SparseLinear):
            matrix, bias = layer.matrix, layer.bias
            dtypes = matrix.dtype, matrix.values.dtype, matrix.dtype if bias is None else bias.dtype
            found[layer.kind, matrix.columns, getattr(matrix, "lanes", None), dtypes][path] = layer
    for group in found.values():
        if len(group) > 1 and sum(layer.matrix.values.numel() for layer in group.values()) < MOST_VALUES:
            yield group


class Siblings(nn.Module):
    """Layers as one. They do not know of it before `adopt`."""

    def __init__(self, layers: Sequence[SparseLinear]) -> None:
        super().__init__()
        self._rows = [layer.out_features for layer in layers]
        bias = None
        if any(layer.bias is not None for layer in layers):
            bias = torch.cat([_bias(layer) for layer in layers])
        matrix, first = stacked([layer.matrix for layer in layers]), layers[0]
        self.whole = SparseLinear(matrix, bias=bias, tiles=first.tiles, kind=first.kind)
        self._views: list[Tensor] = []
        self._pending: tuple[weakref.ref[Tensor], Moment, dict[int, Tensor]] | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """What each layer gives; contiguous, as of any linear layer."""
        return tuple(part.contiguous() for part in self.whole(x).split(self._rows, -1))

    def tune(self, batch: int, seconds: float) -> float:
        """Find the fastest tile. Returns the microseconds that all layers then take."""
        whole, few = self.whole, min(batch, MOST_SAMPLES)
        tile, _ = fastest(whole.matrix, TILES[whole.kind], few, seconds)
        whole.tiles = {few: tile}
        check(whole, DenseLinear(whole.dense_weight(), whole.bias), whole.matrix, batch)
        return time_layer(self, whole.matrix, batch)

    def adopt(self, layers: Sequence[SparseLinear]) -> None:
        """Let the layers it was made of compute as one, and hold views of its weights instead of their own."""
        biases = [None] * len(layers) if self.whole.bias is None else self.whole.bias.split_with_sizes(self._rows)
        matrices = views(self.whole.matrix, [layer.matrix for layer in layers])
        for place, (layer, matrix, bias) in enumerate(zip(layers, matrices, biases, strict=True)):
            layer.hold(matrix)
            layer.bias = None if layer.bias is None else bias
            layer.tiles = self.whole.tiles
            layer.together = functools.partial(self.part, place)
            self._views.append(layer.matrix_values)

    def part(self, place: int, layer: SparseLinear, x: Tensor) -> Tensor | None:
        """What a layer gives for x; None if it has to compute that alone."""
        now = moment(x)
        is_few = x.numel() <= FEW_ROUNDS * MOST_SAMPLES * x.shape[-1]
        if now is None or not is_few or layer.matrix_values is not self._views[place]:  # converted, or moved
            return None
        pending = self._start(x, now) if place == 0 else self._pending
        if pending is None or pending[0]() is not x or pending[1] != now:
            return None
        found = pending[2].pop(place, None)
        if not pending[2]:
            self._pending = None
        return found

    def _start(self, x: Tensor, now: Moment) -> tuple[weakref.ref[Tensor], Moment, dict[int, Tensor]]:
        parts = dict(enumerate(self(x)))
        # what nobody took goes when x does
        self._pending = weakref.ref(x, lambda _: parts.clear()), now, parts
        return self._pending


def _bias(layer: SparseLinear) -> Tensor:
    matrix = layer.matrix
    return matrix.values.new_zeros(matrix.rows, dtype=matrix.dtype) if layer.bias is None else layer.bias


# Matrices


def stacked(matrices: Sequence[Matrix]) -> Matrix:
    """A matrix of the rows of all, which are alike."""
    first, rows = matrices[0], [matrix.rows for matrix in matrices]
    parts: dict[str, list[Any]] = {name: [getattr(matrix, name) for matrix in matrices] for name in vars(first)}
    changed: dict[str, Any] = {"rows": sum(rows)}
    if isinstance(first, LaneMatrix):
        changed["most_units"] = max(parts["most_units"])
        parts["order"] = _shifted(parts["order"], rows)
        for name in ("unit_starts", "slab_starts"):
            starts = _shifted(parts[name], [int(starts[-1]) for starts in parts[name]])
            parts[name] = [*(part[:-1] for part in starts[:-1]), starts[-1]]  # one ends where the next begins
    else:
        parts["starts"] = _shifted(parts["starts"], [len(values) for values in parts["values"]])
    changed |= {name: torch.cat(tensors) for name, tensors in parts.items() if isinstance(tensors[0], Tensor)}
    return dataclasses.replace(first, **changed)


def _shifted(tensors: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    """Numbers that count from the beginning of their own part, counted from that of the first."""
    return [tensor + before for tensor, before in zip(tensors, accumulate([0, *lengths[:-1]]), strict=True)]


def views(whole: Matrix, matrices: Sequence[Matrix]) -> list[Matrix]:
    """The matrices that it is stacked of, with their largest tensors in its memory."""
    names = [name for name in ("index", "bases", "marks", "values") if getattr(whole, name, None) is not None]
    split = [getattr(whole, name).split([len(getattr(matrix, name)) for matrix in matrices]) for name in names]
    parts: list[dict[str, Any]] = [dict(zip(names, tensors, strict=True)) for tensors in zip(*split, strict=True)]
    return [dataclasses.replace(matrix, **part) for matrix, part in zip(matrices, parts, strict=True)]
