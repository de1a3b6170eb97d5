# mypy: allow-untyped-calls
# Triton has no types
"""Sparse matrices on a GPU, and their products with a few columns: y = x W^T for x of (batch, columns).

A *unit* is eight weights of one row, which one lane of a warp takes: 16 bytes of bfloat16 in one load. A *slab* has one
unit for each lane of a row, and eight *runs* across them: entry `i` of run `j` is the `j`-th weight of unit `i`.
A run is *consecutive* live weights, so when all lanes read x at their `j`-th column, they read neighbours: at 90 %
sparsity 16 lanes touch 3 cache lines instead of 16. This is the limit of such a kernel once its loads are wide: an H200
brings 20 bytes a cycle to a multiprocessor, 5 to 6 weights, but looks up only 4 cache lines a cycle.

A weight has an 8-bit offset from the column at which its run begins, and a run has 16 bits for that column. With 16
lanes this is 3.1 bytes a weight in bfloat16, 6.4 times fewer than dense at 90 %. A run ends early where the next column
is 256 away or more, and is filled up with zeros: less than 1 % at 90 %. Gaps from weight to weight would need a prefix
sum across lanes; offsets need one addition. 16-bit columns, 4 bytes a weight, were about 10 % slower at 90 %.

The last slab of a row is as narrow as it can be, so at most seven zeros are added to a row, plus those of short runs.
Rows lie sorted by length, longest first, so that those of one program are alike; `order` says where they belong.

On CUDA, products run in Triton, or in its interpreter (TRITON_INTERPRET=1); elsewhere on a dense copy, for tests.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.deployment.cpu.matrix import SparseMatrix
from growprune.errors import GrowpruneError

RUNS = 8
"""Number of runs in a slab, which is also the number of weights in a unit."""
REACH = 256
"""First and last column of a run are less than this apart, because an offset has eight bits."""
MOST_COLUMNS = 1 << 16
SLOTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The byte of each run in a unit's offsets. Every other byte then forms four 16-bit numbers, which are added to the
four 16-bit first columns at once."""


@dataclass(frozen=True, eq=False)
class LaneMatrix:
    """A sparse matrix in the format of `product`."""

    rows: int
    columns: int
    lanes: int
    most_units: int
    """The largest number of units of a row."""
    offsets: Tensor
    """int64, one word for each unit: eight bytes, in the order of `SLOTS`."""
    bases: Tensor
    """int64, two words for each slab: the first columns of its eight runs, 16 bits each."""
    values: Tensor
    """(units, 8)"""
    unit_starts: Tensor
    """int32: the first unit of each row, in sorted order, and the end of the last."""
    slab_starts: Tensor
    """int32: the same for slabs."""
    order: Tensor
    """int32: the row of the matrix at each place of the sorted order."""

    @property
    def nbytes(self) -> int:
        """The bytes that a product reads."""
        tensors = (self.offsets, self.bases, self.values, self.unit_starts, self.slab_starts, self.order)
        return sum(tensor.nbytes for tensor in tensors)

    def dense(self) -> Tensor:
        """Return the matrix, (rows, columns)."""
        flat = torch.zeros(self.rows * self.columns, dtype=self.values.dtype, device=self.values.device)
        unit_rows = torch.repeat_interleave(self.order.long(), self.unit_starts.diff().long())
        # padding adds a zero to some weight of the row
        flat.index_add_(0, (unit_rows[:, None] * self.columns + self.places()).view(-1), self.values.reshape(-1))
        return flat.view(self.rows, self.columns)

    def places(self) -> Tensor:
        """Return the columns, int64 (units, 8)."""
        offsets = self.offsets.view(torch.uint8).view(-1, RUNS)[:, list(SLOTS)].long()
        starts, slabs = self.unit_starts.long(), self.slab_starts.long()
        row = torch.repeat_interleave(torch.arange(self.rows, device=starts.device), starts.diff())
        slab = slabs[row] + (torch.arange(len(offsets), device=starts.device) - starts[row]) // self.lanes
        return offsets + (self.bases.view(torch.int16).view(-1, RUNS).long() & 0xFFFF)[slab]


def lane_matrix(entries: SparseMatrix, *, lanes: int = 16) -> LaneMatrix:
    """Arrange the weights of a matrix for the lanes of a warp. Values keep their dtype.

    Args:
        entries: in blocks of 1 x 1, on the device to compute on; see `SparseMatrix.to`.
        lanes: how many lanes share a row: a power of two up to 32.
    """
    if entries.columns > MOST_COLUMNS:
        raise GrowpruneError(
            f"the matrix has {entries.columns} columns, but 16-bit columns allow {MOST_COLUMNS}: leave the layer dense"
        )
    order = entries.starts.diff().argsort(descending=True, stable=True)
    bounds, widths, num_slabs = _cut(entries, order, lanes)
    begins, lengths = bounds[:, :-1].reshape(-1), bounds.diff().reshape(-1)
    run = torch.repeat_interleave(torch.arange(len(begins), device=bounds.device), lengths)  # the run of each weight
    lane = torch.arange(len(run), device=bounds.device) - _starts(lengths)[run]
    unit, entry = _starts(widths)[run // RUNS] + lane, begins[run] + lane
    num_units, columns = int(widths.sum()), entries.places[entry]
    padded = torch.cat([entries.places, entries.places.new_zeros(1)])
    first = torch.where(lengths == 0, 0, padded[begins])  # the first column of each run
    values = entries.values.new_zeros(num_units * RUNS)
    values[unit * RUNS + run % RUNS] = entries.values[entry]
    offsets = torch.zeros(num_units * RUNS, dtype=torch.uint8, device=order.device)
    slots = torch.tensor(SLOTS, device=order.device)
    offsets[unit * RUNS + slots[run % RUNS]] = (columns - first[run]).to(torch.uint8)
    slab_starts = _starts(num_slabs)
    unit_starts = _starts(widths)[slab_starts]
    return LaneMatrix(
        rows=entries.rows,
        columns=entries.columns,
        lanes=lanes,
        most_units=int(unit_starts.diff().amax()) if entries.rows else 0,
        offsets=offsets.view(torch.int64),
        bases=first.to(torch.int16).view(torch.int64),
        values=values.view(-1, RUNS),
        unit_starts=unit_starts.to(torch.int32),
        slab_starts=slab_starts.to(torch.int32),
        order=order.to(torch.int32),
    )


def _cut(entries: SparseMatrix, order: Tensor, lanes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return where the runs of each slab begin and end (slabs, 9), row by row; lanes by slab; and slabs by row."""
    begin, end = entries.starts[:-1][order], entries.starts[1:][order]
    # for each entry, the next entry in its row or a later one that a run from it cannot reach
    keys = entries.block_rows * (entries.columns + REACH) + entries.places
    limits = torch.searchsorted(keys, keys + REACH)
    limits = torch.cat([limits, limits.new_full((1,), len(keys))])  # for rows that begin after the last entry
    wide, counts = [], torch.zeros_like(begin)
    while True:  # slabs of full width, while some row continues after them
        bounds = _runs(begin, end, lanes, limits)
        goes_on = bounds[:, RUNS] < end
        if not bool(goes_on.any()):
            break
        wide.append(torch.where(goes_on[:, None], bounds, -1))
        counts += goes_on
        begin = torch.where(goes_on, bounds[:, RUNS], begin)
    width = torch.full_like(begin, lanes)  # of the last slab: the smallest that reaches the end of the row
    for narrower in range(lanes - 1, 0, -1):
        width = torch.where(_runs(begin, end, narrower, limits)[:, RUNS] == end, narrower, width)
    last = _runs(begin, end, width, limits)
    every = torch.stack([*wide, torch.where((begin < end)[:, None], last, -1)], 1).view(-1, RUNS + 1)
    widths = torch.full((len(order), len(wide) + 1), lanes, device=order.device)
    widths[:, -1] = width
    exists = every[:, 0] >= 0
    return every[exists], widths.view(-1)[exists], counts + (begin < end)


def _runs(begin: Tensor, end: Tensor, lanes: int | Tensor, limits: Tensor) -> Tensor:
    """Return where the runs of one slab of each row begin and end (rows, 9)."""
    bounds = [begin]
    for _ in range(RUNS):
        bounds.append(torch.minimum(torch.minimum(bounds[-1] + lanes, end), limits[bounds[-1]]))
    return torch.stack(bounds, 1)


def _starts(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


# Products

MOST_SAMPLES = 16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Tile:
    """How a program divides the work of a product."""

    warps: int = 4
    width: int = 32
    """Threads that share a row. A program has 32 * warps / width rows."""
    steps: int = 2
    """Units of a thread that are loaded together."""
    is_pinned: bool = False
    """Keep loads before their uses: more bytes are in flight, but more registers are used, so fewer threads fit."""


ENOUGH_PROGRAMS = 264
"""Two programs for each multiprocessor of an H200. With fewer, several programs share the columns of a row."""
LOAD_BYTES = 16
"""Bytes of one load: a column of 8 samples, or of 4 in float32. The matrix is read once for each load."""
NEAR_BYTES = 160 << 10
"""Bytes of x that stay in the first-level cache of an H200, which has 256 KB."""


def product(matrix: LaneMatrix, x: Tensor, tile: Tile | None = None) -> Tensor:
    """Multiply the matrix with up to 16 samples. Return (batch, rows) in the dtype of x, always with the same bits."""
    dtype, device = matrix.values.dtype, matrix.values.device
    if x.dim() != 2 or x.shape[1] != matrix.columns or len(x) > MOST_SAMPLES or (x.dtype, x.device) != (dtype, device):
        raise GrowpruneError(
            f"x is {x.dtype} {tuple(x.shape)} on {x.device}, but must be {dtype} (batch, {matrix.columns}) with a "
            f"batch of 1 to {MOST_SAMPLES} on {device}, as the matrix is"
        )
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # Triton then runs its kernels on the CPU, slowly
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
    if batch > 1:  # so that one load reads all inputs of a column
        inputs = torch.empty(rounds, matrix.columns, together, dtype=dtype, device=device)
        grid = (-(-matrix.columns // 128), rounds, 1)
        _launch(kernels._interleave_kernel, grid, (x, inputs), (batch, matrix.columns, together, 128), 4)
    width = min(tile.width, tile.warps * 32)
    rows = tile.warps * 32 // width
    programs, slabs = -(-matrix.rows // rows), -(-matrix.most_units // matrix.lanes)
    least = -(-matrix.columns * together * x.element_size() // NEAR_BYTES)
    split = max(1, min(max(least, -(-ENOUGH_PROGRAMS // programs)), slabs, 16))
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
    """Return the errors that kernels raise if they do not compile or run here."""
    try:
        from triton.errors import TritonError
    except ImportError:  # without Triton, no kernel is started
        return (RuntimeError, NotImplementedError)
    return (RuntimeError, NotImplementedError, TritonError)


class SparseLinear(nn.Module):
    """A linear layer that runs on our kernels for up to 16 samples, and with a temporary dense copy for more.

    It has no parameters, because nothing is trained. Its weights stay on their device.
    """

    def __init__(self, matrix: LaneMatrix, *, bias: Tensor | None = None, tile: Tile | None = None) -> None:
        super().__init__()
        self.matrix, self.bias, self.tile = matrix, bias, tile
        self.out_features, self.in_features = matrix.rows, matrix.columns

    @property
    def weight(self) -> Tensor:
        """The dense weight (rows, columns), for code that reads it. Each access builds it again."""
        return self.matrix.dense()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = F.linear(flat, self.weight) if len(flat) > MOST_SAMPLES else product(self.matrix, flat, self.tile)
        out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], out.shape[-1])
