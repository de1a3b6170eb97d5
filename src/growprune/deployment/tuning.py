"""Which tile suits a layer on this machine: a few are tried, the fastest stays. No single one wins everywhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from growprune.deployment.geometry import Geometry
from growprune.deployment.layer import Activation, Layer, NativeLayer
from growprune.deployment.library import Tile, library, require_library
from growprune.deployment.matrix import SparseMatrix
from growprune.deployment.torch_layers import CsrLayer, DenseLayer

CSR_FROM = 0.9
"""The sparsity from which on torch's CSR is worth its while."""
SHAPES = ((4, 256), (3, 256), (4, 128), (2, 512), (6, 128), (8, 64), (8, 128), (2, 256))
"""(vectors, k_block) worth a try, the likeliest first: blocks of X that about fit the caches next to a core."""
SHAPES_OF_EIGHT = ((2, 512), (3, 256), (1, 512), (2, 256))
"""For blocks of eight rows, which need eight times as many registers."""
LARGEST_OFFSET = 65535
"""Places in a packed block must fit 16 bits."""


def prepare(
    matrix: SparseMatrix,
    geometry: Geometry,
    *,
    bias: Tensor | None = None,
    activation: Activation = Activation.NONE,
    threads: int | None = None,
    seconds: float = 0.1,
) -> Layer:
    """The layer as it runs sparse here: on our kernels, tuned for `seconds` at most.

    Where they cannot be built, on torch's CSR from 90 % sparsity on, and dense below.
    """
    if library() is not None:
        return tune(matrix, geometry, bias=bias, activation=activation, threads=threads, seconds=seconds)[0]
    is_csr = geometry.is_plain and matrix.sparsity >= CSR_FROM
    return (CsrLayer if is_csr else DenseLayer)(matrix, geometry, bias=bias, activation=activation)


def tune(
    matrix: SparseMatrix,
    geometry: Geometry,
    *,
    bias: Tensor | None = None,
    activation: Activation = Activation.NONE,
    threads: int | None = None,
    seconds: float = 0.1,
) -> tuple[NativeLayer, float]:
    """The fastest of the candidates, and how long a call of it takes. The likeliest is tried whatever the time."""
    x, out = torch.randn(geometry.channels, geometry.in_columns), torch.empty(matrix.rows, geometry.columns)
    tiles = candidates(matrix, geometry, threads or torch.get_num_threads())
    end = time.perf_counter() + seconds
    best: tuple[NativeLayer, float] | None = None
    for i, tile in enumerate(tiles):
        if best is not None and time.perf_counter() >= end:
            break
        layer = NativeLayer(matrix, geometry, tile, bias=bias, activation=activation)
        taken = seconds_of(layer.bind(x, out), (end - time.perf_counter()) / (len(tiles) - i))
        if best is None or taken < best[1]:
            best = layer, taken
    assert best is not None
    return best


def seconds_of(call: Callable[[], object], seconds: float) -> float:
    """How long a call takes at its quickest, watched for so long, and for three calls at least.

    The first does not count: it fills caches. The quickest tells more than a mean does: other programs only slow it.
    """
    call()
    end = time.perf_counter() + seconds
    taken: list[float] = []
    while len(taken) < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)


def candidates(matrix: SparseMatrix, geometry: Geometry, threads: int) -> list[Tile]:
    """Tiles worth a try, the likeliest first. They are the same for any number of threads, but for how rows are cut."""
    found = require_library()
    threads = threads if found.has_threads else 1
    lanes = min((n for n in (1, 4, 8) if geometry.columns <= n < found.lanes), default=found.lanes)
    shapes: tuple[tuple[int, int], ...] = SHAPES_OF_EIGHT if matrix.height == 8 else SHAPES
    if lanes < found.lanes:
        shapes = ((1, LARGEST_OFFSET),)
    tiles = (
        Tile(lanes, vectors, k_block, row_chunks, threads)
        for vectors, k_block in dict.fromkeys(_fit(matrix, geometry, lanes, *shape) for shape in shapes)
        for row_chunks in _row_chunks(-(-geometry.columns // (lanes * vectors)), threads)
    )
    return list(tiles)


def _fit(matrix: SparseMatrix, geometry: Geometry, lanes: int, vectors: int, k_block: int) -> tuple[int, int]:
    """No more vectors than there are columns for, shared evenly by the panels; no more rows of X than there are."""
    num_vectors = -(-geometry.columns // lanes)
    num_panels = -(-num_vectors // vectors)
    vectors = -(-num_vectors // num_panels)
    width = matrix.width
    k_block = min(k_block, LARGEST_OFFSET // (vectors * lanes) + 1, max(1, -(-matrix.columns // width)) * width)
    return vectors, k_block // width * width


def _row_chunks(num_panels: int, threads: int) -> Iterator[int]:
    """Threads share panels of columns, where there are enough of them, or the rows, or both."""
    if num_panels >= threads:
        yield 1
    if threads > 1:
        yield threads
    if threads % 2 == 0 and threads > 2 and num_panels >= 2:
        yield threads // 2
