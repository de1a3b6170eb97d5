"""Which tile suits a layer on this machine: a few are tried, the fastest stays. No single one wins everywhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from growprune.deploy.geometry import Geometry
from growprune.deploy.layer import Activation, NativeLayer, require_library
from growprune.deploy.matrix import SparseMatrix
from growprune.deploy.native import Tile

SHAPES = ((4, 128), (4, 256), (6, 128), (8, 128), (2, 256), (3, 256), (2, 512), (8, 64))
"""(vectors, k_block) worth a try, the likeliest first: blocks of X that about fit the first-level cache."""
SHAPES_OF_EIGHT = ((2, 256), (3, 256), (2, 512), (3, 128), (1, 512))
"""For blocks of eight rows, which need eight times as many registers."""
LARGEST_OFFSET = 65535
"""Places in a packed block must fit 16 bits."""


def candidates(matrix: SparseMatrix, geometry: Geometry, threads: int) -> list[Tile]:
    """Tiles worth a try, the likeliest first."""
    lanes = lanes_for(geometry.columns)
    if lanes < require_library().lanes:
        return [_tile(matrix, geometry, lanes, 1, LARGEST_OFFSET // lanes, threads, threads)]
    shapes = SHAPES_OF_EIGHT if matrix.height == 8 else SHAPES
    found = {}
    for vectors, k_block in shapes:
        for row_chunks in _splits(geometry, lanes, vectors, threads):
            found[_tile(matrix, geometry, lanes, vectors, k_block, row_chunks, threads)] = None
    return list(found)


def lanes_for(columns: int) -> int:
    """Few columns take short vectors."""
    most = require_library().lanes
    return 1 if columns == 1 else min((n for n in (4, 8, 16) if n >= columns and n < most), default=most)


def _tile(
    matrix: SparseMatrix, geometry: Geometry, lanes: int, vectors: int, k_block: int, row_chunks: int, threads: int
) -> Tile:
    """With no more vectors than there are columns for, shared evenly by panels, and no more rows than there are."""
    num_vectors = -(-geometry.columns // lanes)
    vectors = min(vectors, num_vectors)
    vectors = -(-num_vectors // -(-num_vectors // vectors))
    k_block = min(k_block, LARGEST_OFFSET // (vectors * lanes) + 1, -(-matrix.columns // matrix.width) * matrix.width)
    return Tile(lanes, vectors, max(1, k_block // matrix.width) * matrix.width, row_chunks, threads)


def _splits(geometry: Geometry, lanes: int, vectors: int, threads: int) -> Sequence[int]:
    """Into how many chunks of rows: none where there are panels for all threads, and all where there are few."""
    panels = -(-geometry.columns // (lanes * vectors))
    if threads == 1:
        return (1,)
    if panels < threads:
        return (threads,)
    return (1, threads)
