"""Layers and pools that are ready to run, for one matrix and one number of columns.

All layers have one interface: `NativeLayer`, `DepthwiseLayer` and `PoolLayer` run on our kernels, `DenseLayer` runs in
torch.
Activations are feature-major, `[channels][columns]`. Their row stride may be larger than the number of columns.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from growprune.deployment.cpu.geometry import Geometry
from growprune.deployment.cpu.library import (
    BoundLayer,
    Tile,
    TileStruct,
    geometry_struct,
    library,
    matrix_struct,
    strided,
)
from growprune.deployment.cpu.matrix import SparseMatrix
from growprune.errors import GrowpruneError

WORTH_THREADS = 8192
"""The number of vector operations from which on several threads are faster than one."""


class Activation(enum.IntEnum):
    """The activation after bias and residual, with the numbers of native/epilogue.h."""

    NONE = 0
    RELU = 1
    GELU = 2
    """The exact GELU with erf, which is torch's default."""
    RELU6 = 3


@dataclass
class LayerSpec:
    """What a layer computes, independent of what runs it."""

    name: str
    weight: SparseMatrix
    geometry: Geometry
    bias: Tensor | None = None
    is_sparse: bool = True
    activation: Activation = Activation.NONE
    is_depthwise: bool = False
    """True if each channel is filtered separately to one output. Each row of the matrix has the taps of one channel."""


class Layer:
    """Base class of layers, which compute an output from an input and may add a residual."""

    def __init__(self, geometry: Geometry, rows: int) -> None:
        self.geometry, self.rows = geometry, rows

    def bind(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Callable[[], object]:
        """Check tensors, and return a function that runs the layer on them. Calls start faster without checks.

        Args:
            x: (channels, in_columns), float32 on the CPU, with adjacent columns.
            out: (rows, columns), otherwise like x, as is the residual. It may be the residual, but must not overlap x.
        """
        check_matrix("x", x, self.geometry.channels, self.geometry.in_columns)
        check_matrix("out", out, self.rows, self.geometry.columns)
        if residual is not None:
            check_matrix("residual", residual, self.rows, self.geometry.columns)
        return self._bound(x, out, residual)

    def _bound(self, x: Tensor, out: Tensor, residual: Tensor | None) -> Callable[[], object]:
        raise NotImplementedError


class LibraryLayer(Layer):
    """A layer on our kernels. Several threads may call it. Only the first calls in a thread allocate memory."""

    def _hold(self, plan: int | None, problem: str) -> None:
        """Keep a layer of the library, and free it with this object. If it is None, raise `problem`."""
        if not plan:
            raise GrowpruneError(problem)
        self._plan = plan
        weakref.finalize(self, library().free, plan)

    def _bound(self, x: Tensor, out: Tensor, residual: Tensor | None) -> Callable[[], object]:
        bound = BoundLayer(self._plan, *strided(x), *strided(out), *strided(residual))
        return LayerCalls([bound], kept=(self, x, out, residual))


class LayerCalls:
    """Several layers that run in one call of the library, because each call from Python takes a microsecond."""

    def __init__(self, layers: list[BoundLayer], kept: tuple[object, ...]) -> None:
        self._layers, self._kept = layers, kept  # keep the objects that the layers point to
        self._array, self._run = (BoundLayer * len(layers))(*layers), library().run

    def __call__(self) -> None:
        self._run(self._array, len(self._array))

    @staticmethod
    def joined(calls: Iterable[Callable[[], object]]) -> list[Callable[[], object]]:
        """Return the same calls, where consecutive LayerCalls are joined into one."""
        found: list[Callable[[], object]] = []
        for is_ours, some in itertools.groupby(calls, lambda call: isinstance(call, LayerCalls)):
            if is_ours:
                group: list[Any] = list(some)
                layers = [layer for call in group for layer in call._layers]
                found.append(LayerCalls(layers, kept=tuple(group)))
            else:
                found += some
        return found


class NativeLayer(LibraryLayer):
    """A sparse product, divided according to a tile."""

    def __init__(self, spec: LayerSpec, tile: Tile) -> None:
        super().__init__(spec.geometry, spec.weight.rows)
        self.tile, matrix, bias = tile, spec.weight, bias_of(spec)
        structs = (matrix_struct(matrix), geometry_struct(spec.geometry), TileStruct(*dataclasses.astuple(tile)))
        self._hold(
            library().prepare(*structs, strided(bias)[0], int(spec.activation)),
            f"{tile} does not suit {matrix.rows} x {matrix.columns} weights in blocks of {matrix.height} x "
            f"{matrix.width} with {spec.geometry}, or there is no memory: give one of tuning.candidates",
        )


class DepthwiseLayer(LibraryLayer):
    """A dense convolution that filters each channel separately."""

    def __init__(self, spec: LayerSpec, threads: int) -> None:
        super().__init__(spec.geometry, spec.weight.rows)
        g, taps, bias = spec.geometry, spec.weight.dense().contiguous(), bias_of(spec)
        given = (geometry_struct(g), taps.data_ptr(), strided(bias)[0], int(spec.activation), False, threads)
        self._hold(library().prepare_windows(*given), f"there is no memory for a depthwise convolution with {g}")


class PoolLayer(LibraryLayer):
    """A max pool, or a mean pool without padding. With windows of one number, it copies its input."""

    def __init__(self, geometry: Geometry, *, is_mean: bool = False) -> None:
        super().__init__(geometry, geometry.channels)
        g, threads = geometry, torch.get_num_threads()
        if g.channels * g.kernel[0] * g.kernel[1] * g.columns < library().lanes * WORTH_THREADS:
            threads = 1
        given = (geometry_struct(g), None, None, int(Activation.NONE), is_mean, threads)
        self._hold(library().prepare_windows(*given), f"there is no memory for a pool with {g}")


class DenseLayer(Layer):
    """A dense layer that runs in torch, in the same layout."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec.geometry, spec.weight.rows)
        self._weight, self._bias, self._activation = spec.weight.dense(), bias_of(spec), spec.activation
        g = spec.geometry
        if not g.is_plain:
            self._weight = self._weight.view(self.rows, *g.kernel, -1).permute(0, 3, 1, 2).contiguous()

    def _bound(self, x: Tensor, out: Tensor, residual: Tensor | None) -> Callable[[], object]:
        return partial(self._run, x, out, residual)

    def _run(self, x: Tensor, out: Tensor, residual: Tensor | None) -> None:
        g = self.geometry
        if g.is_plain:
            found = self._weight @ x
        else:
            images = x.reshape(g.channels, g.batch, g.height, g.width).transpose(0, 1)
            found = F.conv2d(images, self._weight, None, g.stride, g.padding, g.dilation).transpose(0, 1).flatten(1)
        if self._bias is not None:
            found += self._bias.view(-1, 1)
        if residual is not None:
            found += residual
        if self._activation is not Activation.NONE:
            ends: Any = {Activation.RELU: F.relu, Activation.RELU6: F.relu6, Activation.GELU: F.gelu}
            found = ends[self._activation](found)
        out.copy_(found)


def bias_of(spec: LayerSpec) -> Tensor | None:
    """Return the bias of a layer as a contiguous float32 tensor on the CPU, or None."""
    if spec.bias is not None and spec.bias.shape != (spec.weight.rows,):
        raise GrowpruneError(f"bias has shape {tuple(spec.bias.shape)}, but the matrix has {spec.weight.rows} rows")
    return None if spec.bias is None else spec.bias.detach().to("cpu", torch.float32).contiguous()


def check_matrix(name: str, tensor: Tensor, rows: int, columns: int) -> None:
    """Raise unless a tensor has the layout that the kernels assume. They trust their pointers."""
    is_float = tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    has_shape = tensor.shape == (rows, columns)
    has_rows = has_shape and (columns == 1 or tensor.stride(1) == 1) and (rows == 1 or tensor.stride(0) >= columns)
    if not is_float or not has_rows:
        raise GrowpruneError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}, but "
            f"must be float32 {(rows, columns)} on the CPU, with columns next to one another"
        )
