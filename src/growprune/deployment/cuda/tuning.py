"""`deploy(..., device="cuda")`: time each linear layer dense, and sparse with several tiles, and choose the fastest."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from growprune.deployment.cpu.matrix import SparseMatrix
from growprune.deployment.cuda.graphs import BEYOND_CACHE, microseconds
from growprune.deployment.cuda.products import (
    MOST_SAMPLES,
    LaneMatrix,
    SparseLinear,
    Tile,
    kernel_failures,
    lane_matrix,
)
from growprune.deployment.deployed import Replaced, Swapped
from growprune.deployment.example import Example, first_inputs, of_the_example, restored
from growprune.deployment.layer_table import Row
from growprune.deployment.skeleton import Skeleton, nothing_like
from growprune.errors import first_line, warn

TILES = (
    Tile(4, 32, 2),
    Tile(4, 32, 4, is_pinned=True),
    Tile(4, 32, 2, is_pinned=True),
    Tile(4, 32, 4),
    Tile(4, 16, 4, is_pinned=True),
    Tile(2, 32, 4, is_pinned=True),
    Tile(4, 128, 1),
)
"""The tiles to try, the most promising first."""
NUM_CALLS = 20
"""The minimum number of calls timed together, because a short graph takes as long to start as to run."""
MOST_COPIES = 64
LARGEST_ERROR = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
"""The largest error of a product, relative to the norm of the dense one: several times the rounding error."""


def deploy_linears(
    skeleton: Skeleton, example: Example, *, device: torch.device, seconds: float, known: Sequence[Row]
) -> Swapped:
    """Move a skeleton's module to the device, and replace the linear layers that run sparse.

    The example determines how many samples each layer is timed with. A layer that it does not call stays in torch.

    Args:
        seconds: about how long layers may be timed. With 0, all layers without a known row run sparse.
        known: rows of earlier measurements.
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
        """Return the kind of a layer. Layers of one kind are timed once."""
        plain: Any = module.get_submodule(path)
        matrix = layers[path]
        about = matrix.rows, matrix.columns, round(matrix.sparsity, 1), plain.weight.dtype
        return *about, plain.bias is not None, samples[path]

    share, measured = seconds / max(1, len(set(map(kind_of, layers)))), dict[object, Row]()
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
        elif seconds <= 0:
            row = replace(row, choice="sparse")
        else:
            if (key := kind_of(path)) not in measured:
                measured[key] = choose(row, entries, bias=bias, batch=num, seconds=share)
            row = replace(measured[key], layer=path, sparsity=matrix.sparsity)
        swapped.rows.append(row)
        if num and row.choice == "sparse":
            tile: Any = row.tile
            part = SparseLinear(lane_matrix(entries), bias=bias, tile=tile)
            owner._modules[local] = part
            swapped.replaced.append(Replaced(owner, local, part, plain))
            plain.weight.data = nothing_like(plain.weight.detach(), plain.weight.shape)
    return swapped


def choose(
    row: Row, entries: SparseMatrix, *, bias: Tensor | None = None, batch: int = 1, seconds: float = float("inf")
) -> Row:
    """Time a layer dense and sparse. Return its row with the times and the faster choice.

    If the sparse kernel fails, or gives other outputs than the dense layer, the layer stays dense, with a warning.

    Args:
        entries: values in the dtype to compute in, on the device to compute on.
        batch: how many samples the layer is timed with.
        seconds: about how long it may be timed, without the time to compile kernels.
    """
    dense, x, few = dense_linear(entries.dense(), bias), _input(entries, batch), min(batch, MOST_SAMPLES)
    dense_us = time_of(copies(dense), x)
    row = replace(row, choice="dense", dense_ms=dense_us / 1e3)
    try:
        matrix = lane_matrix(entries)
        tile, sparse_us = fastest(matrix, TILES, few, seconds / 2)
        layer = SparseLinear(matrix, bias=bias, tile=tile)
        if batch > MOST_SAMPLES or bias is not None:
            sparse_us = time_of(copies(layer), x)
        with torch.no_grad():
            expected, found = dense(x).double(), layer(x).double()
        error = float((found - expected).norm()) / max(float(expected.norm()), 1e-6)
        if not error < LARGEST_ERROR[x.dtype]:  # true for NaN, too
            raise RuntimeError(f"its relative difference from the dense product is {error:.1e}")
    except kernel_failures() as failure:
        warn(f"{row.layer} was not timed on the sparse kernel: {first_line(failure)}")
        return row
    row = replace(row, sparse_ms=sparse_us / 1e3)
    return replace(row, choice="sparse", tile=tile) if sparse_us < dense_us else row


def dense_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
    return layer


def fastest(matrix: LaneMatrix, tiles: Sequence[Tile], batch: int, seconds: float = float("inf")) -> tuple[Tile, float]:
    """Return the fastest tile that can run, and the microseconds of a product with it. Raise if none can run."""
    tried = dict(times_of_tiles(matrix, tiles, batch, seconds))
    found = {tile: us for tile, us in tried.items() if isinstance(us, float)}
    if not found:
        raise RuntimeError(f"no tile can run: {tried[tiles[0]]}")
    best = min(found, key=lambda tile: found[tile])
    return best, found[best]


def times_of_tiles(
    matrix: LaneMatrix, tiles: Sequence[Tile], batch: int, seconds: float = float("inf")
) -> Iterator[tuple[Tile, float | str]]:
    """Yield the microseconds of a product with each tile, or why it cannot run. At least one is tried."""
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
    """Return the layer with enough copies that no cache holds all their weights."""
    weights: Any = layer.matrix if isinstance(layer, SparseLinear) else layer.weight
    count = min(MOST_COPIES, max(2, -(-BEYOND_CACHE // max(1, weights.nbytes))))
    return [layer, *(copy.deepcopy(layer) for _ in range(count - 1))]


def time_of(layers: Sequence[nn.Module], x: Tensor) -> float:
    """Return the microseconds of one call when these layers are called in turn."""
    calls = [lambda layer=layer: layer(x) for layer in layers] * -(-NUM_CALLS // len(layers))
    with torch.no_grad():
        return microseconds(calls)


def _input(of: SparseMatrix | LaneMatrix, batch: int) -> Tensor:
    device = of.values.device
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(batch, of.columns, generator=generator, device=device).to(of.values.dtype)
