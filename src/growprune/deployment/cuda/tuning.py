"""`deploy(..., device="cuda")`: which format and tile, or dense, is fastest for each layer on this GPU."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from growprune.deployment.cpu.matrix import SparseMatrix
from growprune.deployment.cuda.formats import DENSE, FORMATS, LaneMatrix
from growprune.deployment.cuda.graphs import BEYOND_CACHE, microseconds
from growprune.deployment.cuda.products import MOST_SAMPLES, SparseLinear, Tile, kernel_failures
from growprune.deployment.deployed import Replaced, Swapped
from growprune.deployment.example import Example, first_inputs, first_line, of_the_example, restored
from growprune.deployment.layer_table import Row
from growprune.deployment.skeleton import Skeleton, nothing_like
from growprune.errors import warn

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


def deploy_linears(
    skeleton: Skeleton, example: Example, *, device: torch.device, seconds: float, known: Sequence[Row]
) -> Swapped:
    """Move a skeleton's module to the device, and swap its sparse linear layers.

    The example shows how many samples each layer is called with. A layer that it does not call stays in torch.

    Args:
        seconds: how long layers may be timed, about; with 0, whatever is sparse runs sparse.
        known: what was measured before.
    """
    module = skeleton.module
    skeleton.fill_in()
    module.to(device).requires_grad_(False)
    with restored(module.modules()), of_the_example():
        inputs = first_inputs(module, example.mapped(lambda x: x.to(device) if isinstance(x, Tensor) else x))
    layers = {name.removesuffix(".weight"): matrix for name, matrix in skeleton.matrices.items()}
    samples = dict.fromkeys(layers, 0)
    for path in layers.keys() & inputs.keys():
        x = next(leaf for leaf in inputs[path].leaves if isinstance(leaf, Tensor))
        samples[path] = x.numel() // max(1, x.shape[-1])

    def kind_of(path: str) -> object:
        """Layers of one kind are timed once."""
        plain: Any = module.get_submodule(path)
        matrix = layers[path]
        about = matrix.rows, matrix.columns, round(matrix.sparsity, 1), plain.weight.dtype
        return *about, plain.bias is not None, samples[path]

    share, measured = seconds / max(1, len(set(map(kind_of, layers)))), dict[object, Choice]()
    swapped, before = Swapped(module), {row.layer: row for row in known}
    for path, matrix in layers.items():
        owner_path, _, local = path.rpartition(".")
        owner, num = module.get_submodule(owner_path), samples[path]
        plain: Any = module.get_submodule(path)
        row = Row(path, f"{matrix.rows}x{matrix.columns} x {num or '-'}", matrix.sparsity, None, None, "torch")
        entries = matrix.to(device, plain.weight.dtype)
        bias: Any = None if plain.bias is None else plain.bias.detach()
        if not num:
            swapped.in_torch.append(f"{path} (the example does not call it)")
        elif path in before:
            row = before[path]
        elif seconds <= 0:  # the likeliest
            row = replace(row, choice="sparse", format="offsets")
        else:
            if (key := kind_of(path)) not in measured:
                measured[key] = choose(entries, bias=bias, batch=num, seconds=share)
                for kind, why in measured[key].failed.items():
                    warn(f"{path} was not timed as {kind}: {why}")
            found = measured[key]
            choice = DENSE if found.kind == DENSE else "sparse"
            sparse_ms = None if found.sparse_us is None else found.sparse_us / 1e3
            row = replace(row, choice=choice, format=found.kind, tile=found.tile)
            row = replace(row, dense_ms=found.dense_us / 1e3, sparse_ms=sparse_ms)
        swapped.rows.append(row)
        if num and row.format in FORMATS:
            tile: Any = row.tile
            part = SparseLinear(FORMATS[row.format](entries), bias=bias, tile=tile, samples=min(num, MOST_SAMPLES))
            owner._modules[local] = part
            swapped.replaced.append(Replaced(owner, local, part, plain))
            plain.weight.data = nothing_like(plain.weight.detach(), plain.weight.shape)
    return swapped


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
    weights: Any = layer.matrix.values if isinstance(layer, SparseLinear) else layer.weight
    num_bytes = layer.matrix.num_bytes if isinstance(layer, SparseLinear) else weights.nbytes
    count = min(MOST_COPIES, max(2, -(-BEYOND_CACHE // max(1, num_bytes)))) if weights.is_cuda else 1
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
