"""Measure, then swap: which of the formats, tiles, 2:4 or dense is fastest for a layer on this GPU."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from growprune.deployment.cuda.formats import MOST_COLUMNS, Entries, bitmask_matrix, lane_matrix
from growprune.deployment.cuda.graphs import BEYOND_CACHE, microseconds
from growprune.deployment.cuda.linear import DenseLinear, SemiStructuredLinear, SparseLinear, semi_structured
from growprune.deployment.cuda.products import MOST_SAMPLES, BitmaskTile, LaneTile, Matrix, Tile, kernel_failures
from growprune.deployment.example import first_line

LANE_TILES = (
    LaneTile(4, 32, 2),
    LaneTile(4, 32, 4, is_pinned=True),
    LaneTile(4, 32, 2, is_pinned=True),
    LaneTile(4, 32, 4),
    LaneTile(4, 16, 4, is_pinned=True),
    LaneTile(4, 16, 2, is_ahead=True, is_pinned=True),
    LaneTile(2, 32, 4, is_pinned=True),
    LaneTile(4, 128, 1),
)
BITMASK_TILES = (BitmaskTile(32, 128, 4, 3), BitmaskTile(16, 256, 4, 1), BitmaskTile(64, 64, 4, 3))
"""Tiles worth a try, the likeliest first."""
FEW_ALIVE = 0.07
"""The density below which runs of 16 would often reach further than an offset does; so they are runs of 8."""
NUM_CALLS = 20
"""Calls that are timed together, at least: a graph of few takes as long to start as to run."""
MOST_COPIES = 64
LARGEST_ERROR = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
"""Of a product against the dense one, relative to its norm: several times what rounding gives."""


@dataclass(frozen=True, eq=False)
class Choice:
    """The layer that is kept, and what was measured."""

    layer: nn.Module
    kind: str
    dense_us: float
    sparse_us: float | None
    """Of the fastest that is not dense; None if nothing but dense can run."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """What could not run here, and why."""

    @property
    def tiles(self) -> dict[int, Tile]:
        return self.layer.tiles if isinstance(self.layer, SparseLinear) else {}


FORMATS: Mapping[str, Callable[[Entries], Matrix]] = {
    "offsets": lambda entries: lane_matrix(entries, lanes=8 if 1 - entries.sparsity < FEW_ALIVE else 16),
    "columns": lambda entries: lane_matrix(entries, lanes=16, has_offsets=False),
    "bitmask": bitmask_matrix,
}
TILES: Mapping[str, Sequence[Tile]] = {"offsets": LANE_TILES, "columns": LANE_TILES, "bitmask": BITMASK_TILES}


def choose(entries: Entries, *, bias: Tensor | None = None, batch: int = 1, seconds: float = float("inf")) -> Choice:
    """Time a layer in each format and dense, and keep the fastest.

    What fails, or gives something else than the dense layer, is left out; see `failed`.

    Args:
        entries: values in the dtype to compute in, on the device to compute on.
        batch: how many samples the layer is timed with.
        seconds: how long it may be timed, about; compiling kernels does not count.
    """
    dense = DenseLinear(entries.dense(), bias)
    taken = {dense.kind: time_layer(dense, entries, batch)}
    layers: dict[str, nn.Module] = {dense.kind: dense}
    failed: dict[str, str] = {}
    for kind in (*FORMATS, SemiStructuredLinear.kind):
        try:
            found = _timed(kind, entries, bias, batch, seconds / (1 + len(FORMATS)))
            if found is not None:
                check(found[0], dense, entries, batch)
                layers[kind], taken[kind] = found
        except kernel_failures() as error:
            failed[kind] = first_line(error)
    best = min(taken, key=lambda kind: taken[kind])
    sparse_us = min((us for kind, us in taken.items() if kind != dense.kind), default=None)
    return Choice(layers[best], best, taken[dense.kind], sparse_us, failed)


def make(
    entries: Entries, kind: str, *, bias: Tensor | None = None, tiles: Mapping[int, Tile] | None = None
) -> nn.Module:
    """The layer of a kind that was chosen before."""
    if kind == DenseLinear.kind:
        return DenseLinear(entries.dense(), bias)
    if kind == SemiStructuredLinear.kind:
        return SemiStructuredLinear(entries.dense(), bias)
    return SparseLinear(FORMATS[kind](entries), bias=bias, tiles=tiles, kind=kind)


def _timed(
    kind: str, entries: Entries, bias: Tensor | None, batch: int, seconds: float
) -> tuple[nn.Module, float] | None:
    """A layer that is not dense, and what it takes with its best tiles; None if it does not suit the matrix."""
    if kind == SemiStructuredLinear.kind:
        packed = semi_structured(entries, bias)
        if packed is None:
            return None
        again = [semi_structured(entries, bias) for _ in range(3)]  # they cannot be copied
        layers = [packed, *(layer for layer in again if layer is not None)]
        return packed, time_of(layers, _input(entries, batch))
    if kind != "bitmask" and entries.columns > MOST_COLUMNS:
        return None
    matrix = FORMATS[kind](entries)
    few = min(batch, MOST_SAMPLES)
    tile, us = fastest(matrix, TILES[kind], few, seconds)
    layer = SparseLinear(matrix, bias=bias, tiles={few: tile}, kind=kind)
    return layer, time_layer(layer, entries, batch) if batch > MOST_SAMPLES or bias is not None else us


def check(layer: nn.Module, dense: nn.Module, entries: Entries | Matrix, batch: int) -> None:
    """Raise RuntimeError if a layer does not give what the dense one gives."""
    x = _input(entries, batch)
    with torch.no_grad():
        expected, found = dense(x).double(), layer(x).double()
    error = float((found - expected).norm()) / max(float(expected.norm()), 1e-6)
    if not error < LARGEST_ERROR[x.dtype]:  # a NaN is wrong too
        raise RuntimeError(f"its relative difference from the dense product is {error:.1e}")


def fastest(matrix: Matrix, tiles: Sequence[Tile], batch: int, seconds: float = float("inf")) -> tuple[Tile, float]:
    """The fastest of some tiles, and what a product takes with it. One that cannot run is left out, unless none can."""
    tried = dict(times_of_tiles(matrix, tiles, batch, seconds))
    found = {tile: us for tile, us in tried.items() if isinstance(us, float)}
    if not found:
        raise RuntimeError(f"no tile can run: {tried[tiles[0]]}")
    best = min(found, key=lambda tile: found[tile])
    return best, found[best]


def times_of_tiles(
    matrix: Matrix, tiles: Sequence[Tile], batch: int, seconds: float = float("inf")
) -> Iterator[tuple[Tile, float | str]]:
    """Microseconds that a product takes with each tile, or why it cannot run; at least one is tried."""
    layers = copies(SparseLinear(matrix))
    x = _input(matrix, batch)
    for tile in tiles:
        for layer in layers:
            layer.tiles = {batch: tile}  # type: ignore[assignment]
        start = time.monotonic()
        taken: float | str
        try:
            with torch.no_grad():
                layers[0](x)  # compiles
            start = time.monotonic()
            taken = time_of(layers, x)
        except kernel_failures() as error:
            taken = first_line(error)
        yield tile, taken
        seconds -= time.monotonic() - start
        if seconds <= 0:
            return


def time_layer(layer: nn.Module, entries: Entries | Matrix, batch: int) -> float:
    return time_of(copies(layer), _input(entries, batch))


def copies(layer: nn.Module) -> list[nn.Module]:
    """The layer and as many copies as it takes that no cache holds the weights; alone on the CPU."""
    buffers = list(layer.buffers())
    num_bytes = sum(buffer.numel() * buffer.element_size() for buffer in buffers)
    is_cuda = any(buffer.is_cuda for buffer in buffers)
    count = min(MOST_COPIES, max(2, -(-BEYOND_CACHE // max(1, num_bytes)))) if is_cuda else 1
    return [layer, *(copy.deepcopy(layer) for _ in range(count - 1))]


def time_of(layers: Sequence[nn.Module], x: Tensor) -> float:
    """Microseconds that a call of these layers takes, in turn."""
    rounds = -(-NUM_CALLS // len(layers)) if x.is_cuda else 1
    calls = [lambda layer=layer: layer(x) for layer in layers] * rounds
    with torch.no_grad():
        return microseconds(calls, device=x.device)


def _input(of: Entries | Matrix, batch: int) -> Tensor:
    device = of.values.device
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(batch, of.columns, generator=generator, device=device).to(of.dtype)
