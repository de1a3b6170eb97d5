"""A prepared layer: out = activation(W x + bias + residual), for one matrix and one number of columns.

Three siblings with one interface: `NativeLayer` here runs on our kernels; `CsrLayer` and `DenseLayer` (torch_layers.py)
on what torch has. Activations are feature-major, `[channels][columns]`; rows may be further apart than they are long.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from growprune.deployment.geometry import Geometry
from growprune.deployment.library import Tile, geometry_struct, matrix_struct, require_library, strided, tile_struct
from growprune.deployment.matrix import SparseMatrix
from growprune.errors import GrowpruneError


class Activation(enum.IntEnum):
    """What comes last, after bias and residual. The numbers are those of native/epilogue.h."""

    NONE = 0
    RELU = 1
    GELU = 2
    """With erf, as torch has it by default."""


class Layer(Protocol):
    """A layer that is ready to run."""

    @property
    def geometry(self) -> Geometry: ...

    @property
    def rows(self) -> int:
        """Features of the output."""

    def __call__(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
        """Write to `out`, which may be the residual but must not overlap x, and return it.

        Args:
            x: (channels, in_columns) float32 on the CPU, its columns next to one another.
            out: (rows, columns), likewise; so is the residual.
        """

    def bind(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Callable[[], object]:
        """A call with these very tensors, checked now, so that it is quick to start later."""


class NativeLayer:
    """On our kernels. A call allocates nothing, but for the first ones in a thread; several threads may call it."""

    def __init__(
        self,
        matrix: SparseMatrix,
        geometry: Geometry,
        tile: Tile,
        *,
        bias: Tensor | None = None,
        activation: Activation = Activation.NONE,
    ) -> None:
        self._library = require_library()
        self.geometry, self.rows, self.tile = geometry, matrix.rows, tile
        bias = checked_bias(bias, matrix)
        structs = (matrix_struct(matrix), geometry_struct(geometry), tile_struct(tile))
        self._plan = self._library.prepare(*structs, strided(bias)[0], int(activation))
        if not self._plan:
            raise GrowpruneError(
                f"{tile} does not suit {matrix.rows} x {matrix.columns} weights in blocks of {matrix.height} x "
                f"{matrix.width} with {geometry}, or there is no memory: give one of tuning.candidates"
            )
        weakref.finalize(self, self._library.free, self._plan)

    def __call__(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
        check_operands(self, x, out, residual)
        self._library.run(self._plan, *strided(x), *strided(out), *strided(residual))
        return out

    def bind(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Callable[[], object]:
        check_operands(self, x, out, residual)
        return _Bound(self, (x, out, residual))


class _Bound:
    """A call that is checked. It keeps what it points to alive."""

    def __init__(self, layer: NativeLayer, tensors: tuple[Tensor, Tensor, Tensor | None]) -> None:
        self._kept = (layer, tensors)
        self._run = layer._library.run
        self._arguments = (layer._plan, *(number for tensor in tensors for number in strided(tensor)))

    def __call__(self) -> None:
        self._run(*self._arguments)


def checked_bias(bias: Tensor | None, matrix: SparseMatrix) -> Tensor | None:
    if bias is None:
        return None
    if bias.shape != (matrix.rows,):
        raise GrowpruneError(f"bias has shape {tuple(bias.shape)}, but the matrix has {matrix.rows} rows")
    return bias.detach().to("cpu", torch.float32).contiguous()


def check_operands(layer: Layer, x: Tensor, out: Tensor, residual: Tensor | None) -> None:
    """Refuse what the kernels, which trust their pointers, would read or write wrongly."""
    geometry = layer.geometry
    check_matrix("x", x, geometry.channels, geometry.in_columns)
    check_matrix("out", out, layer.rows, geometry.columns)
    if residual is not None:
        check_matrix("residual", residual, layer.rows, geometry.columns)


def check_matrix(name: str, tensor: Tensor, rows: int, columns: int) -> None:
    is_float = tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    if not is_float or tensor.shape != (rows, columns) or not _has_rows(tensor):
        raise GrowpruneError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}, but "
            f"must be float32 {(rows, columns)} on the CPU, with columns next to one another"
        )


def _has_rows(tensor: Tensor) -> bool:
    """Whether it is rows that lie one behind the other, with or without gaps."""
    rows, columns = tensor.shape
    return (columns == 1 or tensor.stride(1) == 1) and (rows == 1 or tensor.stride(0) >= columns)
