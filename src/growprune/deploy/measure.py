"""Measure, then swap: each layer is timed sparse and dense on this machine, and the faster one stays."""

from __future__ import annotations

import time
from collections.abc import Iterable
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
    """ "sparse", "dense", or "torch": outside of what is deployed."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Candidate:
    step: LayerStep
    sparse: Layer | None
    dense: Layer | None = None
    seconds: tuple[float, float] | None = None


def choose(steps: Iterable[LayerStep], *, seconds: float, threads: int) -> list[Row]:
    """Give each step the layer that runs it. With no seconds to spend, whatever is sparse runs sparse."""
    steps = list(steps)
    end = time.perf_counter() + seconds
    found = [_Candidate(step, None) for step in steps]
    tiles: dict[object, Tile] = {}
    keys = [_key(candidate.step.fused) for candidate in found]
    num_kinds = max(1, len(set(keys)))
    for candidate, key in zip(found, keys, strict=True):
        fused = candidate.step.fused
        if fused.is_sparse and library() is not None and key not in tiles:
            tiles[key] = _tile(fused, threads, seconds / 2 / num_kinds)
        candidate.sparse = _sparse(fused, tiles.get(key))
    rows = []
    for i, candidate in enumerate(found):
        share = max(0.0, end - time.perf_counter()) / (len(found) - i)
        rows.append(_decide(candidate, seconds > 0, share))
    return rows


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


def _decide(candidate: _Candidate, is_measured: bool, share: float) -> Row:
    step, fused, sparse = candidate.step, candidate.step.fused, candidate.sparse
    dense_seconds = sparse_seconds = None
    dense = None
    if sparse is None or is_measured:
        dense = DenseLayer(fused.weight, fused.geometry, bias=fused.bias, activation=fused.activation)
    if is_measured and sparse is not None and dense is not None:
        x, out = _operands(fused)
        sparse_seconds, dense_seconds = (seconds_of(layer.bind(x, out), share / 2) for layer in (sparse, dense))
    is_sparse = dense is None or (sparse is not None and (sparse_seconds or 0) <= (dense_seconds or 0))
    step.layer = sparse if is_sparse else dense
    weight = fused.weight
    kernel = "" if fused.geometry.taps == 1 else f" ({fused.geometry.kernel[0]}x{fused.geometry.kernel[1]})"
    shape = f"{weight.rows}x{weight.columns}{kernel} x {fused.geometry.columns}"
    ms = [None if s is None else 1e3 * s for s in (dense_seconds, sparse_seconds)]
    return Row(fused.name, shape, weight.sparsity, *ms, "sparse" if is_sparse else "dense")
