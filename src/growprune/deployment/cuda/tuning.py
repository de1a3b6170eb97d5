"""Measure, then swap: which of the formats and tiles, or dense, is fastest for a layer on this GPU."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from growprune.deployment.cpu.matrix import SparseMatrix
from growprune.deployment.cuda.formats import LaneMatrix, lane_matrix
from growprune.deployment.cuda.graphs import BEYOND_CACHE, microseconds
from growprune.deployment.cuda.linear import SparseLinear
from growprune.deployment.cuda.products import MOST_SAMPLES, Tile, kernel_failures
from growprune.deployment.example import first_line

TILES = (
    Tile(4, 32, 2),
    Tile(4, 32, 4, is_pinned=True),
    Tile(4, 32, 2, is_pinned=True),
    Tile(4, 32, 4),
    Tile(4, 16, 4, is_pinned=True),
    Tile(2, 32, 4, is_pinned=True),
    Tile(4, 128, 1),
)
"""Tiles worth a try, the likeliest first."""
NUM_CALLS = 20
"""Calls that are timed together, at least: a graph of few takes as long to start as to run."""
MOST_COPIES = 64
LARGEST_ERROR = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
"""Of a product against the dense one, relative to its norm: several times what rounding gives."""

FORMATS: Mapping[str, Callable[[SparseMatrix], LaneMatrix]] = {
    "offsets": lane_matrix,
    "columns": partial(lane_matrix, has_offsets=False),
}
DENSE = "dense"


@dataclass(frozen=True, eq=False)
class Choice:
    """The kind of layer that is fastest, and what was measured."""

    kind: str
    tile: Tile | None
    dense_us: float
    sparse_us: float | None
    """Of the fastest that is not dense; None if nothing but dense can run."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """What could not run here, and why."""


def choose(
    entries: SparseMatrix, *, bias: Tensor | None = None, batch: int = 1, seconds: float = float("inf")
) -> Choice:
    """Time a layer in each format and dense, and find the fastest.

    What fails, or gives something else than the dense layer, is left out; see `failed`.

    Args:
        entries: values in the dtype to compute in, on the device to compute on.
        batch: how many samples the layer is timed with.
        seconds: how long it may be timed, about; compiling kernels does not count.
    """
    dense, x, few = dense_linear(entries.dense(), bias), _input(entries, batch), min(batch, MOST_SAMPLES)
    taken: dict[str, float] = {DENSE: time_of(copies(dense), x)}
    tiles: dict[str, Tile] = {}
    failed: dict[str, str] = {}
    for kind, make in FORMATS.items():
        try:
            matrix = make(entries)
            tile, us = fastest(matrix, TILES, few, seconds / (1 + len(FORMATS)))
            layer = SparseLinear(matrix, bias=bias, tile=tile, samples=few)
            if batch > MOST_SAMPLES or bias is not None:
                us = time_of(copies(layer), x)
            with torch.no_grad():
                expected, found = dense(x).double(), layer(x).double()
            error = float((found - expected).norm()) / max(float(expected.norm()), 1e-6)
            if not error < LARGEST_ERROR[x.dtype]:  # a NaN is wrong too
                raise RuntimeError(f"its relative difference from the dense product is {error:.1e}")
            tiles[kind], taken[kind] = tile, us
        except kernel_failures() as error:
            failed[kind] = first_line(error)
    best = min(taken, key=lambda kind: taken[kind])
    sparse_us = min((us for kind, us in taken.items() if kind != DENSE), default=None)
    return Choice(best, tiles.get(best), taken[DENSE], sparse_us, failed)


def dense_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A layer of torch with these tensors."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
    return layer


def fastest(matrix: LaneMatrix, tiles: Sequence[Tile], batch: int, seconds: float = float("inf")) -> tuple[Tile, float]:
    """The fastest of some tiles, and what a product takes with it. One that cannot run is left out, unless none can."""
    tried = dict(times_of_tiles(matrix, tiles, batch, seconds))
    found = {tile: us for tile, us in tried.items() if isinstance(us, float)}
    if not found:
        raise RuntimeError(f"no tile can run: {tried[tiles[0]]}")
    best = min(found, key=lambda tile: found[tile])
    return best, found[best]


def times_of_tiles(
    matrix: LaneMatrix, tiles: Sequence[Tile], batch: int, seconds: float = float("inf")
) -> Iterator[tuple[Tile, float | str]]:
    """Microseconds that a product takes with each tile, or why it cannot run; at least one is tried."""
    layers, x = copies(SparseLinear(matrix)), _input(matrix, batch)
    for tile in tiles:
        for layer in layers:
            layer.tile = tile  # type: ignore[assignment]
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


def copies(layer: nn.Module) -> list[nn.Module]:
    """The layer and as many copies as it takes that no cache holds the weights; alone on the CPU."""
    tensors = [*layer.parameters(), *layer.buffers()]
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    is_cuda = any(tensor.is_cuda for tensor in tensors)
    count = min(MOST_COPIES, max(2, -(-BEYOND_CACHE // max(1, num_bytes)))) if is_cuda else 1
    return [layer, *(copy.deepcopy(layer) for _ in range(count - 1))]


def time_of(layers: Sequence[nn.Module], x: Tensor) -> float:
    """Microseconds that a call of these layers takes, in turn."""
    rounds = -(-NUM_CALLS // len(layers)) if x.is_cuda else 1
    calls = [lambda layer=layer: layer(x) for layer in layers] * rounds
    with torch.no_grad():
        return microseconds(calls, device=x.device)


def _input(of: SparseMatrix | LaneMatrix, batch: int) -> Tensor:
    device = of.values.device
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(batch, of.columns, generator=generator, device=device).to(of.values.dtype)
