"""The library of kernels as Python sees it: structures and functions of native/, field by field."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import POINTER, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from growprune.deployment import build
from growprune.deployment.geometry import Geometry
from growprune.deployment.matrix import SparseMatrix
from growprune.errors import GrowpruneError


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("rows", c_int64),
        ("columns", c_int64),
        ("height", c_int32),
        ("width", c_int32),
        ("starts", c_void_p),
        ("places", c_void_p),
        ("values", c_void_p),
    )


class _Geometry(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("channels", "batch", "height", "width")),
        *(
            (f"{name}_{axis}", c_int32)
            for name in ("kernel", "stride", "padding", "dilation", "out")
            for axis in ("height", "width")
        ),
    )


class _Tile(ctypes.Structure):
    _fields_ = tuple((name, c_int32) for name in ("lanes", "vectors", "k_block", "row_chunks", "threads"))


@dataclass(frozen=True)
class Tile:
    """How a product is cut up. It changes how fast a layer is, and the rounding of its sums, and nothing else."""

    lanes: int
    """Floats in a vector: those of the machine, fewer for few columns, 1 for a single one."""
    vectors: int
    """Vectors in a panel of columns."""
    k_block: int
    """Rows of the input that are packed at once."""
    row_chunks: int
    """Into how many chunks of rows the matrix is cut for threads; the others share the panels."""
    threads: int


class Library:
    """The functions of the library, with their types."""

    def __init__(self, library: ctypes.CDLL) -> None:
        strided = (c_void_p, c_int64)
        pool = (POINTER(_Geometry), *strided, *strided)
        self.lanes = int(library.gp_lanes())
        self.has_threads = bool(library.gp_has_openmp())
        self.most_vectors = _typed(library.gp_most_vectors, c_int, c_int, c_int)
        self.prepare = _typed(
            library.gp_prepare, c_void_p, POINTER(_Matrix), POINTER(_Geometry), POINTER(_Tile), c_void_p, c_int
        )
        self.run = _typed(library.gp_run, None, c_void_p, *strided, *strided, *strided)
        self.free = _typed(library.gp_free, None, c_void_p)
        self.max_pool = _typed(library.gp_max_pool, None, *pool, c_int)
        self.mean_pool = _typed(library.gp_mean_pool, None, *pool, c_int, c_int)


def _typed(function: Any, result: Any, *arguments: Any) -> Callable[..., Any]:
    function.restype, function.argtypes = result, arguments
    return function  # type: ignore[no-any-return]


@functools.cache
def library() -> Library | None:
    """The library, built if need be; None where there can be none, which a warning says once."""
    loaded = build.load()
    return None if loaded is None else Library(loaded)


def require_library() -> Library:
    found = library()
    if found is None:
        raise GrowpruneError("the sparse kernels are not there, as a warning has said: let tuning.prepare choose")
    return found


def matrix_struct(matrix: SparseMatrix) -> _Matrix:
    """Its tensors must outlive it."""
    tensors = (matrix.starts, matrix.places, matrix.values)
    assert all(tensor.is_contiguous() for tensor in tensors)
    pointers = (tensor.data_ptr() for tensor in tensors)
    return _Matrix(matrix.rows, matrix.columns, matrix.height, matrix.width, *pointers)


def geometry_struct(geometry: Geometry) -> _Geometry:
    g = geometry
    return _Geometry(g.channels, g.batch, g.height, g.width, *g.kernel, *g.stride, *g.padding, *g.dilation, *g.out_size)


def tile_struct(tile: Tile) -> _Tile:
    return _Tile(tile.lanes, tile.vectors, tile.k_block, tile.row_chunks, tile.threads)


def strided(tensor: Tensor | None) -> tuple[int | None, int]:
    """What the library takes for a tensor: where it begins, and how far its rows are apart."""
    return (None, 0) if tensor is None else (tensor.data_ptr(), tensor.stride(0))
