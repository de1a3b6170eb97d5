"""Layers that run on torch: what is there without a compiler, and what our kernels are measured against."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from growprune.deployment.geometry import Geometry
from growprune.deployment.layer import Activation, check_operands, checked_bias
from growprune.deployment.matrix import SparseMatrix
from growprune.errors import GrowpruneError


class _TorchLayer:
    """What both have in common: everything but the product."""

    def __init__(
        self,
        matrix: SparseMatrix,
        geometry: Geometry,
        *,
        bias: Tensor | None = None,
        activation: Activation = Activation.NONE,
    ) -> None:
        bias = checked_bias(bias, matrix)
        self.geometry, self.rows = geometry, matrix.rows
        self._bias, self._activation = None if bias is None else bias.view(-1, 1), activation
        self._weight = self._prepare(matrix)

    def __call__(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
        check_operands(self, x, out, residual)
        found = self._multiply(x)
        if self._bias is not None:
            found += self._bias
        if residual is not None:
            found += residual
        if self._activation is Activation.RELU:
            found.relu_()
        elif self._activation is Activation.GELU:
            found = F.gelu(found)
        return out.copy_(found)

    def bind(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Callable[[], object]:
        check_operands(self, x, out, residual)
        return partial(self, x, out, residual)

    def _prepare(self, matrix: SparseMatrix) -> Tensor:
        raise NotImplementedError

    def _multiply(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class CsrLayer(_TorchLayer):
    """On torch's CSR. Only for plain geometries: anything else would have to unfold its whole input."""

    def _prepare(self, matrix: SparseMatrix) -> Tensor:
        if not self.geometry.is_plain:
            raise GrowpruneError(f"CSR of torch cannot convolve, but {self.geometry} was given: take a DenseLayer")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse (CSR|invariant)")  # it is in beta, and trusts its indices
            return matrix.dense().to_sparse_csr()

    def _multiply(self, x: Tensor) -> Tensor:
        return self._weight @ x


class DenseLayer(_TorchLayer):
    """Dense, in the same layout."""

    def _prepare(self, matrix: SparseMatrix) -> Tensor:
        weight, geometry = matrix.dense(), self.geometry
        if geometry.is_plain:
            return weight
        return weight.view(matrix.rows, *geometry.kernel, geometry.channels).permute(0, 3, 1, 2).contiguous()

    def _multiply(self, x: Tensor) -> Tensor:
        g = self.geometry
        if g.is_plain:
            return self._weight @ x
        images = x.reshape(g.channels, g.batch, g.height, g.width).transpose(0, 1)
        found = F.conv2d(images, self._weight, None, g.stride, g.padding, g.dilation)
        return found.transpose(0, 1).flatten(1)
