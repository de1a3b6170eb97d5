"""Measure, then swap: each layer is timed sparse and dense on this machine, and the faster one stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from growprune.deploy.fuse import Fused
from growprune.deploy.layer import Layer, NativeLayer
from growprune.deploy.library import Tile, library
from growprune.deploy.steps import LayerStep
from growprune.deploy.torch_layers import CsrLayer, DenseLayer
from growprune.deploy.tuning import CSR_FROM, candidates, seconds_of


@dataclass(frozen=True)
class Row:
    """A layer, and how it runs."""

    layer: str
    shape: str
    """Of its weight, and how many columns it is multiplied with."""
    sparsity: float
    dense_ms: float | None
    """None where it was not measured."""
    sparse_ms: float | None
    choice: str
    """"sparse", "dense", or "torch": outside of what is deployed."""
    tile: Tile | None = None
    """How the product is cut up, where it runs on our kernels."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Chosen:
    """How a layer ran when it was measured before."""

    is_sparse: bool
    tile: Tile | None


def choose(steps: Sequence[LayerStep], *, seconds: float, threads: int, chosen: Mapping[str, Chosen]) -> list[Row]:
    """Give each step the layer that runs it. With no seconds to spend, whatever is sparse runs sparse.

    Half of the time goes to finding tiles, one for each kind of layer, and half to timing each layer.

    Args:
        chosen: by layer, what was measured before.
    """
    end = time.perf_counter() + seconds
    keys = [_key(step.fused) for step in steps]
    tiles: dict[object, Tile] = {}
    share = seconds / 2 / max(1, len(set(keys)))
    rows = []
    for step, key in zip(steps, keys, strict=True):
        fused = step.fused
        known = chosen.get(fused.name)
        if fused.is_sparse and library() is not None and key not in tiles:
            tiles[key] = known.tile if known and known.tile else _tile(fused, threads, share)
    for i, step in enumerate(steps):
        left = max(0.0, end - time.perf_counter()) / (len(steps) - i)
        step.layer, row = _decide(step.fused, tiles.get(keys[i]), left if seconds > 0 else None, chosen)
        rows.append(row)
    return rows


def choose_layer(fused: Fused, *, seconds: float, threads: int) -> tuple[Layer, Row]:
    """The layer that runs a single one."""
    tile = _tile(fused, threads, seconds / 2) if library() is not None else None
    return _decide(fused, tile, seconds / 2 if seconds > 0 else None, {})


def _key(fused: Fused) -> object:
    """Layers of one kind are cut up alike."""
    weight = fused.weight
    return fused.geometry, weight.rows, weight.height, weight.width, round(weight.sparsity, 1), fused.activation


def _operands(fused: Fused) -> tuple[Tensor, Tensor]:
    geometry = fused.geometry
    return torch.randn(geometry.channels, geometry.in_columns), torch.empty(fused.rows, geometry.columns)


def _tile(fused: Fused, threads: int, seconds: float) -> Tile:
    """The tile that is fastest; the likeliest, if there is no time to try."""
    tiles = candidates(fused.weight, fused.geometry, threads)
    if seconds <= 0 or len(tiles) == 1:
        return tiles[0]
    x, out = _operands(fused)
    end, best = time.perf_counter() + seconds, (float("inf"), tiles[0])
    for i, tile in enumerate(tiles):
        left = end - time.perf_counter()
        if i and left <= 0:
            break
        layer = NativeLayer(fused.weight, fused.geometry, tile, bias=fused.bias, activation=fused.activation)
        taken = seconds_of(layer.bind(x, out), left / (len(tiles) - i))
        best = min(best, (taken, tile), key=lambda pair: pair[0])
    return best[1]


def _sparse(fused: Fused, tile: Tile | None) -> Layer | None:
    if not fused.is_sparse:
        return None
    if tile is not None:
        return NativeLayer(fused.weight, fused.geometry, tile, bias=fused.bias, activation=fused.activation)
    if fused.geometry.is_plain and fused.weight.sparsity >= CSR_FROM:
        return CsrLayer(fused.weight, fused.geometry, bias=fused.bias, activation=fused.activation)
    return None


def _decide(fused: Fused, tile: Tile | None, seconds: float | None, chosen: Mapping[str, Chosen]) -> tuple[Layer, Row]:
    """The faster one; without seconds, that of before, or the sparse one."""
    sparse, known = _sparse(fused, tile), chosen.get(fused.name)
    is_measured = seconds is not None and known is None and sparse is not None
    if sparse is not None and not is_measured and (known is None or known.is_sparse):
        return sparse, _row(fused, None, None, "sparse", sparse)
    dense = DenseLayer(fused.weight, fused.geometry, bias=fused.bias, activation=fused.activation)
    if sparse is None or not is_measured or seconds is None:
        return dense, _row(fused, None, None, "dense", dense)
    x, out = _operands(fused)
    calls = [layer.bind(x, out) for layer in (dense, sparse)]
    taken = _quickest(calls, seconds / 2)
    if taken[0] < taken[1]:  # a layer that we expect to be faster is heard twice: others may use the machine
        taken = [min(pair) for pair in zip(taken, _quickest(calls, seconds / 2), strict=True)]
    is_sparse = taken[1] <= taken[0]
    layer = sparse if is_sparse else dense
    return layer, _row(fused, taken[0], taken[1], "sparse" if is_sparse else "dense", sparse)


def _quickest(calls: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """How long each call takes at its quickest, in turns, so that whatever else the machine does hits all of them."""
    best = [float("inf")] * len(calls)
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < 3 or time.perf_counter() < end:
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
        rounds += 1
    return best


def _row(fused: Fused, dense: float | None, sparse: float | None, choice: str, layer: Layer) -> Row:
    weight, geometry = fused.weight, fused.geometry
    kernel = "" if geometry.taps == 1 else f" ({geometry.kernel[0]}x{geometry.kernel[1]})"
    shape = f"{weight.rows}x{weight.columns}{kernel} x {geometry.columns}"
    ms = [None if seconds is None else 1e3 * seconds for seconds in (dense, sparse)]
    tile = layer.tile if isinstance(layer, NativeLayer) else None
    return Row(fused.name, shape, weight.sparsity, ms[0], ms[1], choice, tile)
