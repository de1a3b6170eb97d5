"""A prepared layer: out = activation(W x + bias + residual), for one matrix and one number of columns.

Three siblings with one interface: `NativeLayer` runs on our kernels, `CsrLayer` on torch's CSR, `DenseLayer` dense.
Activations are feature-major, `[channels][columns]`; rows may be further apart than they are long.
"""

from __future__ import annotations

import enum
import weakref
import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from growprune.deploy.geometry import Geometry
from growprune.deploy.matrix import SparseMatrix
from growprune.deploy.native import Library, Tile, geometry_struct, library, matrix_struct, strided, tile_struct
from growprune.errors import GrowpruneError

CSR_FROM = 0.9
"""The sparsity from which on torch's CSR is worth its while."""


class Activation(enum.IntEnum):
    """What comes last, after bias and residual. The numbers are those of native/epilogue.h."""

    NONE = 0
    RELU = 1
    GELU = 2
    """With erf, as torch has it by default."""


class Layer(Protocol):
    """A layer that is ready to run. It is for one thread at a time."""

    geometry: Geometry
    rows: int

    def __call__(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
        """Write to `out`, which may be the residual but not x, and return it.

        Args:
            x: (channels, in_columns) float32 on the CPU, its columns next to one another.
            out: (rows, columns), likewise; so is the residual.
        """


class NativeLayer:
    """On our kernels. A call allocates nothing."""

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
        bias = _checked_bias(bias, matrix)
        structs = (matrix_struct(matrix), geometry_struct(geometry), tile_struct(tile))
        self._plan = self._library.prepare(*structs, None if bias is None else bias.data_ptr(), int(activation))
        if not self._plan:
            raise GrowpruneError(f"{tile} does not suit a {matrix.height}x{matrix.width} matrix of {matrix.columns} "
                                 f"columns and {geometry}, or memory ran out: let tuning choose the tile")
        weakref.finalize(self, self._library.free, self._plan)

    def __call__(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
        check_operands(self, x, out, residual)
        if not self._library.run(self._plan, *strided(x), *strided(out), *strided(residual)):
            raise GrowpruneError("a prepared layer was called by two threads at once: give each thread its own")
        return out

    def bind(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Callable[[], None]:
        """A call with these very tensors, whose checks are made now. What it returns is quick to start."""
        check_operands(self, x, out, residual)
        run, plan, operands = self._library.run, self._plan, (*strided(x), *strided(out), *strided(residual))
        kept = (self, x, out, residual)

        def call() -> None:
            if not run(plan, *operands):
                raise GrowpruneError(f"{kept[0]} was called by two threads at once: give each thread its own")

        return call


class CsrLayer:
    """On torch's CSR, for plain geometries."""

    def __init__(
        self,
        matrix: SparseMatrix,
        geometry: Geometry,
        *,
        bias: Tensor | None = None,
        activation: Activation = Activation.NONE,
    ) -> None:
        if not geometry.is_plain:
            raise GrowpruneError(f"torch's CSR cannot do {geometry}: use DenseLayer")
        self.geometry, self.rows = geometry, matrix.rows
        bias = _checked_bias(bias, matrix)
        self._bias, self._activation = None if bias is None else bias.view(-1, 1), activation
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR")  # that it is in beta
            self._weight = matrix.dense().to_sparse_csr()

    def __call__(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
        check_operands(self, x, out, residual)
        return _finish(self._weight @ x, self._bias, residual, self._activation, out)


class DenseLayer:
    """Dense, in the same layout: what the others are measured against."""

    def __init__(
        self,
        matrix: SparseMatrix,
        geometry: Geometry,
        *,
        bias: Tensor | None = None,
        activation: Activation = Activation.NONE,
    ) -> None:
        self.geometry, self.rows = geometry, matrix.rows
        bias = _checked_bias(bias, matrix)
        self._bias, self._activation = None if bias is None else bias.view(-1, 1), activation
        weight = matrix.dense()
        if not geometry.is_plain:
            weight = weight.view(matrix.rows, *geometry.kernel, geometry.channels).permute(0, 3, 1, 2).contiguous()
        self._weight = weight

    def __call__(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
        check_operands(self, x, out, residual)
        found = self._weight @ x if self.geometry.is_plain else self._convolve(x)
        return _finish(found, self._bias, residual, self._activation, out)

    def _convolve(self, x: Tensor) -> Tensor:
        g = self.geometry
        images = x.view(g.channels, g.batch, g.height, g.width).transpose(0, 1)
        found = F.conv2d(images, self._weight, None, g.stride, g.padding, g.dilation)
        return found.transpose(0, 1).reshape(self.rows, -1)


def _finish(found: Tensor, bias: Tensor | None, residual: Tensor | None, activation: Activation, out: Tensor) -> Tensor:
    if bias is not None:
        found += bias
    if residual is not None:
        found += residual
    if activation is Activation.RELU:
        found.relu_()
    elif activation is Activation.GELU:
        found = F.gelu(found)
    return out.copy_(found)


def require_library() -> Library:
    found = library()
    if found is None:
        raise GrowpruneError("the sparse kernels are not there, see the warning before: use CsrLayer or DenseLayer")
    return found


def _checked_bias(bias: Tensor | None, matrix: SparseMatrix) -> Tensor | None:
    if bias is None:
        return None
    if bias.shape != (matrix.rows,):
        raise GrowpruneError(f"bias has shape {tuple(bias.shape)}, but the matrix {matrix.rows} rows")
    return bias.detach().to("cpu", torch.float32).contiguous()


def check_operands(layer: Layer, x: Tensor, out: Tensor, residual: Tensor | None) -> None:
    """Refuse what the kernels, which trust their pointers, would read or write wrongly."""
    geometry = layer.geometry
    outwards = (layer.rows, geometry.columns)
    for name, tensor, shape in (
        ("x", x, (geometry.channels, geometry.in_columns)),
        ("out", out, outwards),
        ("residual", residual, outwards),
    ):
        if tensor is None:
            continue
        is_fine = tensor.shape == shape and tensor.dtype == torch.float32 and tensor.device.type == "cpu"
        if not is_fine or (tensor.stride(1) != 1 and shape[1] > 1) or tensor.stride(0) < shape[1]:
            raise GrowpruneError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}, "
                f"but must be float32 {shape} on the CPU, with columns next to one another"
            )
