"""Convolutions that filter each channel by itself, on a kernel of their own."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from growprune.deployment.cpu.library import geometry_struct, require_library, strided
from growprune.deployment.cpu.matrix import own_channels
from growprune.deployment.cpu.prepared import Layer, LayerSpec
from growprune.errors import GrowpruneError


class DepthwiseLayer(Layer):
    """On our kernel, dense. Several threads may call it."""

    def __init__(self, spec: LayerSpec, threads: int) -> None:
        super().__init__(spec)
        self._library, g = require_library(), spec.geometry
        threads = threads if self._library.has_threads else 1
        taps = own_channels(spec.weight.dense(), spec.groups, g.kernel[0] * g.kernel[1]).contiguous()
        bias = strided(self._bias)[0]
        self._plan = self._library.prepare_depthwise(
            geometry_struct(g), taps.data_ptr(), bias, int(spec.activation), threads
        )
        if not self._plan:
            raise GrowpruneError(f"there is no memory for a depthwise convolution with {g}")
        weakref.finalize(self, self._library.free_depthwise, self._plan)

    def _bound(self, x: Tensor, out: Tensor, residual: Tensor | None) -> Callable[[], object]:
        run, kept = self._library.run_depthwise, (self, x, out, residual)
        arguments = (self._plan, *strided(x), *strided(out), *strided(residual))

        def call(kept: object = kept) -> None:  # keeps the memory alive that the arguments point to
            run(*arguments)

        return call
