"""Layers and pools that are ready to run, for one matrix and one number of columns.

Layers are siblings with one interface: `NativeLayer`, `DepthwiseLayer` and `PoolLayer` run on our kernels, `DenseLayer`
on torch.
Activations are feature-major, `[channels][columns]`; rows may be further apart than they are long.
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
"""How many steps with a whole vector take longer than it takes several threads to share them."""


class Activation(enum.IntEnum):
    """What comes last, after bias and residual. The numbers are those of native/epilogue.h."""

    NONE = 0
    RELU = 1
    GELU = 2
    """With erf, as torch has it by default."""
    RELU6 = 3


@dataclass
class LayerSpec:
    """What a layer computes, whatever runs it."""

    name: str
    weight: SparseMatrix
    geometry: Geometry
    bias: Tensor | None = None
    is_sparse: bool = True
    activation: Activation = Activation.NONE
    is_depthwise: bool = False
    """Whether each channel is filtered by itself, to one output. A row of its matrix has the taps of one channel."""


class Layer:
    """What makes an output of an input, and may add a residual."""

    def __init__(self, geometry: Geometry, rows: int) -> None:
        self.geometry, self.rows = geometry, rows

    def bind(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Callable[[], object]:
        """A call with these very tensors, checked now, so that it is quick to start later.

        Args:
            x: (channels, in_columns) float32 on the CPU, its columns next to one another.
            out: (rows, columns), likewise; so is the residual. It may be the residual, but must not overlap x.
        """
        check_matrix("x", x, self.geometry.channels, self.geometry.in_columns)
        check_matrix("out", out, self.rows, self.geometry.columns)
        if residual is not None:
            check_matrix("residual", residual, self.rows, self.geometry.columns)
        return self._bound(x, out, residual)

    def _bound(self, x: Tensor, out: Tensor, residual: Tensor | None) -> Callable[[], object]:
        raise NotImplementedError


class LibraryLayer(Layer):
    """On our kernels. A call allocates nothing, but for the first ones in a thread; several threads may call it."""

    def _hold(self, plan: int | None, problem: str) -> None:
        """Keep a layer of the library, which is freed with this one. None is a problem."""
        if not plan:
            raise GrowpruneError(problem)
        self._plan = plan
        weakref.finalize(self, library().free, plan)

    def _bound(self, x: Tensor, out: Tensor, residual: Tensor | None) -> Callable[[], object]:
        bound = BoundLayer(self._plan, *strided(x), *strided(out), *strided(residual))
        return LayerCalls([bound], kept=(self, x, out, residual))


class LayerCalls:
    """Calls of layers of the library, one after the other, as one call: each one from Python takes a microsecond."""

    def __init__(self, layers: list[BoundLayer], kept: tuple[object, ...]) -> None:
        self._layers, self._kept = layers, kept  # what is kept is what the layers point to
        self._array, self._run = (BoundLayer * len(layers))(*layers), library().run

    def __call__(self) -> None:
        self._run(self._array, len(self._array))

    @staticmethod
    def joined(calls: Iterable[Callable[[], object]]) -> list[Callable[[], object]]:
        """The same calls, those in a row joined."""
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
    """A sparse product, cut up by a tile."""

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
    """A convolution that filters each channel by itself, dense."""

    def __init__(self, spec: LayerSpec, threads: int) -> None:
        super().__init__(spec.geometry, spec.weight.rows)
        g, taps, bias = spec.geometry, spec.weight.dense().contiguous(), bias_of(spec)
        given = (geometry_struct(g), taps.data_ptr(), strided(bias)[0], int(spec.activation), False, threads)
        self._hold(library().prepare_windows(*given), f"there is no memory for a depthwise convolution with {g}")


class PoolLayer(LibraryLayer):
    """The largest number of each window, or the mean, of windows without padding. With one number in each, a copy."""

    def __init__(self, geometry: Geometry, *, is_mean: bool = False) -> None:
        super().__init__(geometry, geometry.channels)
        g, threads = geometry, torch.get_num_threads()
        if g.channels * g.kernel[0] * g.kernel[1] * g.columns < library().lanes * WORTH_THREADS:
            threads = 1
        given = (geometry_struct(g), None, None, int(Activation.NONE), is_mean, threads)
        self._hold(library().prepare_windows(*given), f"there is no memory for a pool with {g}")


class DenseLayer(Layer):
    """Dense, in torch, in the same layout."""

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
    """The bias of a layer, as the kernels take it."""
    if spec.bias is not None and spec.bias.shape != (spec.weight.rows,):
        raise GrowpruneError(f"bias has shape {tuple(spec.bias.shape)}, but the matrix has {spec.weight.rows} rows")
    return None if spec.bias is None else spec.bias.detach().to("cpu", torch.float32).contiguous()


def check_matrix(name: str, tensor: Tensor, rows: int, columns: int) -> None:
    """Refuse what the kernels, which trust their pointers, would read or write wrongly."""
    is_float = tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    has_shape = tensor.shape == (rows, columns)
    has_rows = has_shape and (columns == 1 or tensor.stride(1) == 1) and (rows == 1 or tensor.stride(0) >= columns)
    if not is_float or not has_rows:
        raise GrowpruneError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}, but "
            f"must be float32 {(rows, columns)} on the CPU, with columns next to one another"
        )
