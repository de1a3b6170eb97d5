# mypy: allow-untyped-calls
# Triton has no types
"""Products of a prepared matrix with a few columns, y = x W^T for x of (batch, columns), and the layer that uses them.

On CUDA in Triton, or through its interpreter (TRITON_INTERPRET=1); elsewhere by a dense copy, for trying things out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.deployment.cuda.formats import LaneMatrix
from growprune.errors import GrowpruneError

MOST_SAMPLES = 16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Tile:
    """How a program divides the work of a product."""

    warps: int = 4
    width: int = 32
    """Threads that share a row; a program has as many rows as its warps have threads for."""
    steps: int = 2
    """Units of a thread whose loads are started together."""
    is_pinned: bool = False
    """Whether loads stay before what uses them: more bytes on their way, but more registers, and so fewer threads."""
    split: int = 0
    """Programs that share the columns of a row; 0: as many as fill the GPU, and keep x in the first-level cache."""


ENOUGH_PROGRAMS = 264
"""Two for each multiprocessor of an H200; with fewer, the columns are split."""
LOAD_BYTES = 16
"""What one load brings: a column of 8 samples, or of 4 in float32. The matrix is read once for each load."""
NEAR_BYTES = 160 << 10
"""Of x, that stay in the first-level cache of an H200, which has 256 KB."""


def product(matrix: LaneMatrix, x: Tensor, tile: Tile | None = None) -> Tensor:
    """(batch, rows), in the dtype of x: the matrix times each of up to 16 samples. The same bits every time."""
    dtype, device = matrix.values.dtype, matrix.values.device
    if x.dim() != 2 or x.shape[1] != matrix.columns or len(x) > MOST_SAMPLES or (x.dtype, x.device) != (dtype, device):
        raise GrowpruneError(
            f"x is {x.dtype} {tuple(x.shape)} on {x.device}, but must be {dtype} (batch, {matrix.columns}) with a "
            f"batch of 1 to {MOST_SAMPLES} on {device}, as the matrix is"
        )
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # Triton runs its kernels on the CPU: slow, but there
    if (not x.is_cuda and not is_interpreted) or not x.numel() or not matrix.rows:
        return F.linear(x.float(), matrix.dense().float()).to(x.dtype)
    try:
        from growprune.deployment.cuda import product_kernels as kernels
    except ImportError:
        raise GrowpruneError("sparse products on CUDA need Triton: pip install triton") from None
    x, batch = x.contiguous(), len(x)
    tile = tile or Tile()
    together = min(LOAD_BYTES // x.element_size(), 1 << (batch - 1).bit_length())
    inputs, rounds = x, -(-batch // together)
    if batch > 1:  # so that one load brings all inputs of a column
        inputs = torch.empty(rounds, matrix.columns, together, dtype=dtype, device=device)
        grid = (-(-matrix.columns // 128), rounds, 1)
        _launch(kernels._interleave_kernel, grid, (x, inputs), (batch, matrix.columns, together, 128), 4)
    width = min(tile.width, tile.warps * 32)
    rows = tile.warps * 32 // width
    programs, slabs = -(-matrix.rows // rows), -(-matrix.most_units // matrix.lanes)
    least = -(-matrix.columns * together * x.element_size() // NEAR_BYTES)
    split = max(1, min(tile.split or max(least, -(-ENOUGH_PROGRAMS // programs)), slabs, 16))
    share = max(1, -(-slabs // split)) * matrix.lanes
    kernel, grid = kernels._lanes_kernel, (programs, split, rounds)
    places = (matrix.unit_starts, matrix.slab_starts, matrix.order)
    tensors = (inputs, matrix.offsets, matrix.bases, matrix.values, *places)
    numbers = (matrix.rows, matrix.columns, batch, share, together)
    sizes = (*numbers, matrix.lanes, width, rows, tile.steps, tile.is_pinned)
    out = torch.empty(batch, matrix.rows, dtype=dtype, device=device)
    if split == 1:
        _launch(kernel, grid, (*tensors, out), sizes, tile.warps)
        return out
    sums = torch.empty(split, batch, matrix.rows, dtype=torch.float32, device=device)
    _launch(kernel, grid, (*tensors, sums), sizes, tile.warps)
    _launch(kernels._sum_kernel, (-(-out.numel() // 256), 1, 1), (sums, out), (out.numel(), split, 256), 4)
    return out


def _launch(kernel: Any, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], sizes: Any, warps: int) -> None:
    if not tensors[0].is_cuda:
        kernel[grid](*tensors, *sizes, num_warps=warps)
        return
    from growprune.storage.triton_kernels import launch

    launch(kernel, grid, tensors, sizes, num_warps=warps)


def kernel_failures() -> tuple[type[Exception], ...]:
    """What a kernel that does not compile, or does not run here, raises."""
    try:
        from triton.errors import TritonError
    except ImportError:  # then none is started
        return (RuntimeError, NotImplementedError)
    return (RuntimeError, NotImplementedError, TritonError)


class SparseLinear(nn.Module):
    """A linear layer on our kernels for up to 16 samples; for more, with a dense copy that is made for the call.

    It has no parameters, because nothing is trained. Its weights stay on their device.

    Args:
        tile: how programs divide the work for up to `samples` samples; others use the default.
    """

    def __init__(
        self,
        matrix: LaneMatrix,
        *,
        bias: Tensor | None = None,
        tile: Tile | None = None,
        samples: int = MOST_SAMPLES,
    ) -> None:
        super().__init__()
        self.matrix, self.bias, self.tile, self.samples = matrix, bias, tile, samples
        self.out_features, self.in_features = matrix.rows, matrix.columns

    @property
    def weight(self) -> Tensor:
        """The dense weight (rows, columns), made anew each time: for code that looks at it."""
        return self.matrix.dense()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) > MOST_SAMPLES:
            out = F.linear(flat, self.weight)
        else:
            out = product(self.matrix, flat, self.tile if len(flat) <= self.samples else None)
        out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], out.shape[-1])
