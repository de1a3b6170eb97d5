"""Measure, then swap: each layer is timed sparse and dense on this machine, and the faster one stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from growprune.deployment.fuse import Fused
from growprune.deployment.layer import Layer, NativeLayer
from growprune.deployment.library import Tile, library
from growprune.deployment.steps import LayerStep
from growprune.deployment.torch_layers import CsrLayer, DenseLayer
from growprune.deployment.tuning import CSR_FROM, candidates, seconds_of


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

    Half of the time goes to finding tiles, one for each kind of layer, and half to timing each layer. Layers of one
    kind take the same time, so they share the quickest: whatever else the machine does only makes layers slower.

    Args:
        chosen: by layer, what was measured before.
    """
    end = time.perf_counter() + seconds
    keys = [_key(step.fused) for step in steps]
    tiles = _tiles(steps, keys, threads, seconds / 2, chosen)
    sparse = [_sparse(step.fused, tiles.get(key)) for step, key in zip(steps, keys, strict=True)]
    times: dict[object, tuple[float, float]] = {}
    for i, (step, key, layer) in enumerate(zip(steps, keys, sparse, strict=True)):
        if seconds > 0 and layer is not None and step.fused.name not in chosen:
            found = _time(step.fused, layer, max(0.0, end - time.perf_counter()) / (len(steps) - i))
            before = times.get(key, found)
            times[key] = min(before[0], found[0]), min(before[1], found[1])
    rows = []
    for step, key, layer in zip(steps, keys, sparse, strict=True):
        step.layer, row = _decide(step.fused, layer, times.get(key), chosen)
        rows.append(row)
    return rows


def _tiles(
    steps: Sequence[LayerStep], keys: Sequence[object], threads: int, seconds: float, chosen: Mapping[str, Chosen]
) -> dict[object, Tile]:
    """By kind of layer, its tile; none where there are no kernels."""
    found: dict[object, Tile] = {}
    share = seconds / max(1, len(set(keys)))
    for step, key in zip(steps, keys, strict=True):
        if step.fused.is_sparse and library() is not None and key not in found:
            known = chosen.get(step.fused.name)
            found[key] = known.tile if known and known.tile else _tile(step.fused, threads, share)
    return found


def choose_layer(fused: Fused, *, seconds: float, threads: int, known: Chosen | None = None) -> tuple[Layer, Row]:
    """The layer that runs a single one.

    Args:
        known: what was measured before, of just this shape.
    """
    tile = None if known is None else known.tile
    if tile is None and library() is not None:
        tile = _tile(fused, threads, seconds / 2)
    sparse = _sparse(fused, tile)
    is_measured = seconds > 0 and sparse is not None and known is None
    times = _time(fused, sparse, seconds / 2) if is_measured and sparse is not None else None
    return _decide(fused, sparse, times, {} if known is None else {fused.name: known})


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


def _time(fused: Fused, sparse: Layer, seconds: float) -> tuple[float, float]:
    """How long a call takes dense, and sparse."""
    dense = DenseLayer(fused.weight, fused.geometry, bias=fused.bias, activation=fused.activation)
    x, out = _operands(fused)
    first, second = _quickest([layer.bind(x, out) for layer in (dense, sparse)], seconds)
    return first, second


def _decide(
    fused: Fused, sparse: Layer | None, times: tuple[float, float] | None, chosen: Mapping[str, Chosen]
) -> tuple[Layer, Row]:
    """The faster one; if it was not measured, that of before, or the sparse one."""
    known = chosen.get(fused.name)
    is_sparse = times[1] <= times[0] if times is not None else known is None or known.is_sparse
    dense, quick = times or (None, None)
    if sparse is not None and is_sparse:
        return sparse, _row(fused, dense, quick, "sparse", sparse)
    layer = DenseLayer(fused.weight, fused.geometry, bias=fused.bias, activation=fused.activation)
    return layer, _row(fused, dense, quick, "dense", sparse)


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


def _row(fused: Fused, dense: float | None, sparse: float | None, choice: str, layer: Layer | None) -> Row:
    weight, geometry = fused.weight, fused.geometry
    kernel = "" if geometry.taps == 1 else f" ({geometry.kernel[0]}x{geometry.kernel[1]})"
    shape = f"{weight.rows}x{weight.columns}{kernel} x {geometry.columns}"
    ms = [None if seconds is None else 1e3 * seconds for seconds in (dense, sparse)]
    tile = layer.tile if isinstance(layer, NativeLayer) else None
    return Row(fused.name, shape, weight.sparsity, ms[0], ms[1], choice, tile)
