"""Measure, then swap: which of the formats, tiles, 2:4 or dense is fastest for a layer on this GPU."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from growprune.inference.cuda.bitmask import bitmask_matrix
from growprune.inference.cuda.entries import Entries
from growprune.inference.cuda.lanes import MOST_COLUMNS, lane_matrix
from growprune.inference.cuda.linear import DenseLinear, SparseLinear, semi_structured
from growprune.inference.cuda.products import BitmaskTile, LaneTile, Matrix, Tile
from growprune.inference.cuda.timing import BEYOND_CACHE, microseconds

LANE_TILES = (LaneTile(4, 32, 2), LaneTile(4, 16, 2), LaneTile(4, 32, 4, False), LaneTile(4, 128, 1, False))
BITMASK_TILES = (BitmaskTile(32, 128, 4, 3), BitmaskTile(16, 256, 4, 1), BitmaskTile(64, 64, 4, 3))
"""Tiles worth a try, the likeliest first."""
FEW_ALIVE = 0.07
"""The density below which runs of 16 would often reach further than an offset does; so they are runs of 8."""
NUM_CALLS = 20
"""Calls that are timed together, at least: a graph of few takes as long to start as to run."""


@dataclass(frozen=True)
class Timed:
    """What one layer takes, for one batch."""

    layer: str
    shape: tuple[int, int]
    sparsity: float
    batch: int
    dense_us: float
    sparse_us: float
    """Of the fastest that is not dense."""
    kind: str
    """Which one that is."""
    choice: str
    """What was kept for the layer: the fastest for all batches together."""


@dataclass(frozen=True, eq=False)
class Choice:
    """The layer that is kept, and what was measured."""

    layer: nn.Module
    rows: tuple[Timed, ...]


FORMATS: Mapping[str, Callable[[Entries], Matrix]] = {
    "offsets": lambda entries: lane_matrix(entries, lanes=8 if 1 - entries.sparsity < FEW_ALIVE else 16),
    "columns": lambda entries: lane_matrix(entries, lanes=16, has_offsets=False),
    "bitmask": bitmask_matrix,
}
TILES: Mapping[str, Sequence[Tile]] = {"offsets": LANE_TILES, "columns": LANE_TILES, "bitmask": BITMASK_TILES}


def choose(
    entries: Entries,
    *,
    bias: Tensor | None = None,
    batches: Sequence[int] = (1,),
    keep_dense: bool = False,
    name: str = "",
) -> Choice:
    """Time a layer in each format and dense, and keep the fastest.

    Args:
        entries: values in the dtype to compute in, on the device to compute on.
        batches: the batches that matter, 16 at most; their times are added up.
        keep_dense: let a sparse layer keep a dense copy too, for batches over 16.
    """
    dense = DenseLinear(entries.dense(), bias)
    taken = {dense.kind: {batch: _time(dense, entries, batch) for batch in batches}}
    layers: dict[str, nn.Module] = {dense.kind: dense}
    for layer, times in _timed(entries, bias, batches):
        layers[layer.kind], taken[layer.kind] = layer, times  # type: ignore[index]
    best = min(taken, key=lambda kind: sum(taken[kind].values()))
    chosen = layers[best]
    if keep_dense and isinstance(chosen, SparseLinear):
        chosen.dense = dense.weight
    return Choice(chosen, tuple(_rows(name, entries, batches, taken, best)))


def choose_all(
    layers: Mapping[str, Entries], *, batches: Sequence[int] = (1,), biases: Mapping[str, Tensor] | None = None
) -> dict[str, Choice]:
    """`choose` for each of some layers, by name."""
    found = biases or {}
    return {name: choose(e, bias=found.get(name), batches=batches, name=name) for name, e in layers.items()}


def table(rows: Sequence[Timed]) -> str:
    """What was measured, as Markdown."""
    lines = ["| layer | shape | sparsity | batch | dense us | sparse us | fastest sparse | choice |", "|---" * 8 + "|"]
    for row in rows:
        numbers = f"{row.sparsity:.1%} | {row.batch} | {row.dense_us:.1f} | {row.sparse_us:.1f}"
        lines.append(f"| {row.layer} | {row.shape[0]} x {row.shape[1]} | {numbers} | {row.kind} | {row.choice} |")
    return "\n".join(lines)


def _timed(
    entries: Entries, bias: Tensor | None, batches: Sequence[int]
) -> Iterator[tuple[nn.Module, dict[int, float]]]:
    """Each layer that is not dense, and what it takes with its best tiles."""
    for kind, make in FORMATS.items():
        if kind != "bitmask" and entries.columns > MOST_COLUMNS:
            continue
        matrix = make(entries)
        tiles, times = {}, {}
        for batch in batches:
            tiles[batch], times[batch] = fastest(matrix, TILES[kind], batch)
        yield SparseLinear(matrix, bias=bias, tiles=tiles, kind=kind), times
    if (layer := semi_structured(entries, bias)) is not None:
        yield layer, {batch: _time(layer, entries, batch) for batch in batches}


def fastest(matrix: Matrix, tiles: Sequence[Tile], batch: int) -> tuple[Tile, float]:
    """The fastest of some tiles, and what a product takes with it."""
    layers = copies(SparseLinear(matrix), matrix.num_bytes)
    found = {}
    for tile in tiles:
        for layer in layers:
            layer.tiles = {batch: tile}  # type: ignore[assignment]
        found[tile] = time_of(layers, _input(matrix.values, matrix.columns, batch))
    best = min(found, key=lambda tile: found[tile])
    return best, found[best]


def _time(layer: nn.Module, entries: Entries, batch: int) -> float:
    num_bytes = entries.rows * entries.columns * entries.values.element_size()
    return time_of(copies(layer, num_bytes), _input(entries.values, entries.columns, batch))


def copies(layer: nn.Module, num_bytes: int) -> list[nn.Module]:
    """The layer and as many copies as it takes that no cache holds the weights; alone on the CPU."""
    is_cuda = any(buffer.is_cuda for buffer in layer.buffers())
    count = min(64, -(-BEYOND_CACHE // max(1, num_bytes))) if is_cuda else 1
    return [layer, *(copy.deepcopy(layer) for _ in range(count - 1))]


def time_of(layers: Sequence[nn.Module], x: Tensor) -> float:
    """Microseconds that a call of these layers takes, in turn."""
    rounds = -(-NUM_CALLS // len(layers)) if x.is_cuda else 1
    calls = [lambda layer=layer: layer(x) for layer in layers] * rounds
    with torch.no_grad():
        return microseconds(calls, device=x.device)


def _input(values: Tensor, columns: int, batch: int) -> Tensor:
    generator = torch.Generator(values.device).manual_seed(0)
    return torch.randn(batch, columns, generator=generator, device=values.device).to(values.dtype)


def _rows(
    name: str, entries: Entries, batches: Sequence[int], taken: Mapping[str, Mapping[int, float]], best: str
) -> Iterator[Timed]:
    first = Timed(name, (entries.rows, entries.columns), entries.sparsity, 0, 0.0, 0.0, "", best)
    for batch in batches:
        kind = min((kind for kind in taken if kind != "dense"), key=lambda kind: taken[kind][batch])
        dense_us, sparse_us = taken["dense"][batch], taken[kind][batch]
        yield dataclasses.replace(first, batch=batch, kind=kind, dense_us=dense_us, sparse_us=sparse_us)
