"""Pooling of feature-major activations: `[channels][batch * height * width]` in and out."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from growprune.deployment.geometry import Geometry
from growprune.deployment.layer import check_matrix
from growprune.deployment.library import geometry_struct, library, strided
from growprune.errors import GrowpruneError


class MaxPool:
    """The largest of each window."""

    def __init__(self, geometry: Geometry, *, threads: int | None = None) -> None:
        self.geometry, self._threads = geometry, threads or torch.get_num_threads()

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        _check(self.geometry, x, out)
        if found := library():
            found.max_pool(geometry_struct(self.geometry), *strided(x), *strided(out), self._threads)
            return out
        g = self.geometry
        pooled = F.max_pool2d(_images(g, x), g.kernel, g.stride, g.padding, g.dilation, g.ceil_mode)
        return out.copy_(pooled.transpose(0, 1).flatten(1))


class MeanPool:
    """The mean of each window; over all of an image, if the kernel is as large."""

    def __init__(self, geometry: Geometry, *, counts_padding: bool = True, threads: int | None = None) -> None:
        if geometry.dilation != (1, 1):
            raise GrowpruneError(f"a mean pool has no dilation, but {geometry} was given")
        self.geometry, self._threads = geometry, threads or torch.get_num_threads()
        self._counts_padding = counts_padding

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        _check(self.geometry, x, out)
        if found := library():
            struct = geometry_struct(self.geometry)
            found.mean_pool(struct, *strided(x), *strided(out), self._counts_padding, self._threads)
            return out
        g = self.geometry
        pooled = F.avg_pool2d(_images(g, x), g.kernel, g.stride, g.padding, g.ceil_mode, self._counts_padding)
        return out.copy_(pooled.transpose(0, 1).flatten(1))


def _check(geometry: Geometry, x: Tensor, out: Tensor) -> None:
    check_matrix("x", x, geometry.channels, geometry.in_columns)
    check_matrix("out", out, geometry.channels, geometry.columns)


def _images(geometry: Geometry, x: Tensor) -> Tensor:
    return x.reshape(geometry.channels, geometry.batch, geometry.height, geometry.width).transpose(0, 1)
