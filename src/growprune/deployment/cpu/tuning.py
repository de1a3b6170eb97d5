"""Time each layer sparse and dense on this machine, and choose the faster version.

No single tile is fastest for all layers, so a few are tried for each kind of layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from growprune.deployment.cpu.geometry import Geometry
from growprune.deployment.cpu.library import Tile, library
from growprune.deployment.cpu.matrix import SparseMatrix
from growprune.deployment.cpu.prepared import (
    WORTH_THREADS,
    DenseLayer,
    DepthwiseLayer,
    Layer,
    LayerSpec,
    NativeLayer,
)
from growprune.deployment.layer_table import Row

WORTH_OUR_THREADS = 0.1
"""How much slower all layers may be on our kernels. A single layer in torch forces all layers onto torch's threads."""
SHAPES = ((4, 256), (3, 256), (4, 128), (2, 512), (6, 128), (8, 64), (8, 128), (2, 256))
"""The (vectors, k_block) to try, the most promising first: blocks of X that about fit the caches of one core."""
SHAPES_OF_EIGHT = ((2, 512), (3, 256), (1, 512), (2, 256))
"""The same for blocks of eight rows, which need eight times as many registers."""
LARGEST_OFFSET = 65535
"""The largest offset in a packed block, which has 16 bits."""


def choose(
    specs: Sequence[LayerSpec],
    *,
    seconds: float,
    threads: int,
    known: Mapping[str, Row],
    all_else_is_ours: bool = False,
) -> list[tuple[Layer, Row]]:
    """Return the layer that runs each spec, and its row. With 0 seconds, layers without a known row run on our kernels.

    Half of the time is for finding a tile for each kind of layer, and half for timing each layer. Layers of one kind
    share their shortest time, because other load on the machine only makes layers slower.

    Args:
        known: earlier measurements, by layer.
        all_else_is_ours: True if torch computes little else, so that avoiding it is worth a few slower layers.
    """
    end = time.perf_counter() + seconds
    keys = []
    for spec in specs:  # layers of one kind have the same tile
        about = spec.weight.rows, spec.weight.height, spec.weight.width, round(spec.weight.sparsity, 1)
        keys.append((spec.geometry, *about, spec.activation, spec.is_sparse))
    tiles: dict[object, Tile] = {}
    share = seconds / 2 / max(1, len({key for spec, key in zip(specs, keys, strict=True) if not spec.is_depthwise}))
    ours: list[Layer] = []
    for spec, key in zip(specs, keys, strict=True):
        if spec.is_depthwise:
            ours.append(DepthwiseLayer(spec, threads))
            continue
        if key not in tiles:
            row = known.get(spec.name)
            possible = candidates(spec.weight, spec.geometry, threads)  # a tile of another shape may not fit
            same = [tile for tile in possible if row is not None and tile == row.tile]
            tiles[key] = same[0] if same else fastest_tile(spec, threads, 0 if row else share)
        ours.append(NativeLayer(spec, tiles[key]))
    times: dict[object, tuple[float, float]] = {}
    for i, (spec, key, layer) in enumerate(zip(specs, keys, ours, strict=True)):
        if seconds > 0 and spec.name not in known and not spec.is_depthwise:
            found = torch_and_our_seconds(spec, layer, max(0.0, end - time.perf_counter()) / (len(specs) - i))
            before = times.get(key, found)
            times[key] = min(before[0], found[0]), min(before[1], found[1])
    measured = [times[key] for key in keys if key in times]
    loses_little = sum(ours for _, ours in measured) <= (1 + WORTH_OUR_THREADS) * sum(map(min, measured))
    chosen: list[tuple[Layer, Row]] = []
    for spec, key, layer in zip(specs, keys, ours, strict=True):
        taken, row = times.get(key), known.get(spec.name)
        if taken is not None:
            is_ours = taken[1] <= taken[0] or (all_else_is_ours and loses_little)
        elif row is None or spec.is_depthwise:
            is_ours = True
        else:
            is_ours = row.choice == "sparse" if spec.is_sparse else row.tile is not None
        height, width = spec.geometry.kernel
        kernel = "" if height == width == 1 else f" ({height}x{width})"
        shape = f"{spec.weight.rows}x{spec.weight.columns}{kernel} x {spec.geometry.columns}"
        dense_ms, sparse_ms = (None, None) if taken is None else (1e3 * taken[0], 1e3 * taken[1])
        if not spec.is_sparse and taken is not None:
            dense_ms, sparse_ms = 1e3 * min(taken), None
        tile = layer.tile if isinstance(layer, NativeLayer) and (spec.is_sparse or is_ours) else None
        choice = "sparse" if is_ours and spec.is_sparse else "dense"
        row = Row(spec.name, shape, spec.weight.sparsity, dense_ms, sparse_ms, choice, tile)
        chosen.append((layer if is_ours else DenseLayer(spec), row))
    return chosen


# Timing


def torch_and_our_seconds(spec: LayerSpec, ours: Layer, seconds: float) -> list[float]:
    return _quickest([DenseLayer(spec), ours], seconds)


def fastest_tile(spec: LayerSpec, threads: int, seconds: float) -> Tile:
    """Return the fastest tile, or the most promising one if there is no time to try."""
    tiles = candidates(spec.weight, spec.geometry, threads)
    if seconds <= 0 or len(tiles) == 1:
        return tiles[0]
    end, taken = time.perf_counter() + seconds, dict[Tile, float]()
    for i, tile in enumerate(tiles):
        left = end - time.perf_counter()
        if i and left <= 0:
            break
        (taken[tile],) = _quickest([NativeLayer(spec, tile)], left / (len(tiles) - i))
    return min(taken, key=lambda tile: taken[tile])


def _quickest(layers: Sequence[Layer], seconds: float) -> list[float]:
    geometry = layers[0].geometry
    x, out = torch.randn(geometry.channels, geometry.in_columns), torch.empty(layers[0].rows, geometry.columns)
    return [min(taken) for taken in seconds_in_turns([layer.bind(x, out) for layer in layers], seconds)]


@torch.no_grad()
def seconds_in_turns(calls: Sequence[Callable[[], object]], seconds: float, pause: float = 0.0) -> list[list[float]]:
    """Time each call several times, in turns, so that other load affects all of them. Return the seconds of each.

    Args:
        pause: seconds to sleep before each timed call. An untimed call then comes before it.
    """
    taken: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while len(taken[0]) < 4 or time.perf_counter() < end:
        for call, times in zip(calls, taken, strict=True):
            if pause:
                time.sleep(pause)
                call()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return taken


# Tiles


def candidates(matrix: SparseMatrix, geometry: Geometry, threads: int) -> list[Tile]:
    """Return the tiles to try, the most promising first. Only `threads` and `row_chunks` depend on the threads.

    A small product runs in one thread, because two would wait for each other and for each other's data.
    """
    longest = library().lanes
    lanes = min((n for n in (1, 4, 8) if geometry.columns <= n < longest), default=longest)
    shapes: tuple[tuple[int, int], ...] = SHAPES_OF_EIGHT if matrix.height == 8 else SHAPES
    if lanes < longest:
        shapes = ((1, LARGEST_OFFSET),)
    num_vectors, width, fitting = -(-geometry.columns // lanes), matrix.width, []
    if (len(matrix.values) + matrix.columns) * num_vectors < WORTH_THREADS:
        threads = 1
    for vectors, k_block in shapes:
        # use no more vectors than the columns fill, spread evenly over the panels, and no more rows than X has
        vectors = -(-num_vectors // -(-num_vectors // vectors))
        k_block = min(k_block, LARGEST_OFFSET // (vectors * lanes) + 1, max(1, -(-matrix.columns // width)) * width)
        fitting.append((vectors, k_block // width * width))
    return [
        Tile(lanes, vectors, k_block, row_chunks, threads)
        for vectors, k_block in dict.fromkeys(fitting)
        for row_chunks in _row_chunks(-(-geometry.columns // (lanes * vectors)), threads)
    ]


def _row_chunks(num_panels: int, threads: int) -> Iterator[int]:
    """Yield numbers of chunks. Threads share panels of columns, if there are enough of them, or the rows, or both."""
    if num_panels >= threads:
        yield 1
    if threads > 1:
        yield threads
    if threads % 2 == 0 and threads > 2 and num_panels >= 2:
        yield threads // 2
