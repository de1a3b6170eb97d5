"""The format of a sparse matrix on a GPU: rows cut for the lanes of a warp.

Live values have 16-bit columns, or 8-bit offsets from a shared column.

A *unit* is eight live weights of one row, which one lane of the GPU takes: 16 bytes of bfloat16 in one load. A *slab*
is as many units as lanes share a row, and eight *runs* across them: entry `i` of run `j` is the `j`-th weight of unit
`i`. A run is *consecutive* live weights, so when all lanes read x at their `j`-th column, they read neighbours: at 90 %
sparsity 16 lanes touch 3 cache lines rather than 16. That is what bounds such a kernel once its loads are wide: an H200
brings 20 bytes a cycle to a multiprocessor, 5 to 6 weights, but looks up only 4 cache lines a cycle.

    columns   16 bits a weight: 4 bytes a weight in bfloat16, 5.0 times fewer than dense at 90 %
    offsets   8 bits a weight from the column at which its run begins, 16 bits a run: with 16 lanes 3.1 bytes a weight,
              6.4 times fewer. A run ends early where the next column is 256 away or more, and is filled up with zeros:
              less than 1 % at 90 %. Gaps from weight to weight would need a prefix sum across lanes; offsets need one
              addition.

The last slab of a row is as narrow as it can be, so at most seven zeros are added to a row, plus those of short runs.
Rows lie sorted by length, longest first, so that those of one program are alike; `order` says where they belong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from growprune.deployment.cpu.matrix import SparseMatrix
from growprune.errors import GrowpruneError

RUNS = 8
"""Runs of a slab, and so weights of a unit."""
REACH = 256
"""How far apart the first and the last column of a run may be, with offsets: what eight bits hold."""
MOST_COLUMNS = 1 << 16
SLOTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which byte of a unit's offsets is that of each run: every other byte is then four 16-bit numbers, to be added to the
four 16-bit first columns at once."""


@dataclass(frozen=True, eq=False)
class LaneMatrix:
    """A matrix as `product` in products.py takes it."""

    rows: int
    columns: int
    lanes: int
    most_units: int
    """Of any row."""
    index: Tensor
    """int64, two words a unit: eight 16-bit columns. With offsets one word: eight bytes, in the order of `SLOTS`."""
    bases: Tensor | None
    """int64, two words a slab: the first columns of its eight runs, 16 bits each; None without offsets."""
    values: Tensor
    """(units, 8)"""
    unit_starts: Tensor
    """int32: the first unit of each row, as sorted; one more than there are."""
    slab_starts: Tensor
    """int32: the same for slabs."""
    order: Tensor
    """int32: which row of the matrix each is."""

    @property
    def num_bytes(self) -> int:
        """What a product reads of it."""
        tensors = (self.index, self.values, self.unit_starts, self.slab_starts, self.order, self.bases)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def dense(self) -> Tensor:
        """The matrix, (rows, columns)."""
        flat = torch.zeros(self.rows * self.columns, dtype=self.values.dtype, device=self.values.device)
        unit_rows = torch.repeat_interleave(self.order.long(), self.unit_starts.diff().long())
        # what is filled up adds a zero to some weight of the row
        flat.index_add_(0, (unit_rows[:, None] * self.columns + self.places()).view(-1), self.values.reshape(-1))
        return flat.view(self.rows, self.columns)

    def places(self) -> Tensor:
        """int64 (units, 8): the columns."""
        if self.bases is None:
            return self.index.view(torch.int16).view(-1, RUNS).long() & 0xFFFF
        offsets = self.index.view(torch.uint8).view(-1, RUNS)[:, list(SLOTS)].long()
        starts, slabs = self.unit_starts.long(), self.slab_starts.long()
        row = torch.repeat_interleave(torch.arange(self.rows, device=starts.device), starts.diff())
        slab = slabs[row] + (torch.arange(len(offsets), device=starts.device) - starts[row]) // self.lanes
        return offsets + (self.bases.view(torch.int16).view(-1, RUNS).long() & 0xFFFF)[slab]


def lane_matrix(entries: SparseMatrix, *, lanes: int = 16, has_offsets: bool = True) -> LaneMatrix:
    """Lay live weights out for the lanes. Values keep their dtype.

    Args:
        entries: in blocks of 1 x 1, on the device to compute on; see `SparseMatrix.to`.
        lanes: how many lanes share a row: a power of two up to 32.
        has_offsets: 8-bit offsets rather than 16-bit columns.
    """
    if entries.columns > MOST_COLUMNS:
        raise GrowpruneError(
            f"the matrix has {entries.columns} columns, but 16-bit columns allow {MOST_COLUMNS}: leave the layer dense"
        )
    order = entries.starts.diff().argsort(descending=True, stable=True)
    bounds, widths, num_slabs = _cut(entries, order, lanes, has_offsets=has_offsets)
    begins, lengths = bounds[:, :-1].reshape(-1), bounds.diff().reshape(-1)
    run = torch.repeat_interleave(torch.arange(len(begins), device=bounds.device), lengths)  # of each live weight
    lane = torch.arange(len(run), device=bounds.device) - _starts(lengths)[run]
    unit, entry = _starts(widths)[run // RUNS] + lane, begins[run] + lane
    num_units, columns = int(widths.sum()), entries.places[entry]
    padded = torch.cat([entries.places, entries.places.new_zeros(1)])
    first = torch.where(lengths == 0, 0, padded[begins])  # the first column of each run
    values = entries.values.new_zeros(num_units * RUNS)
    values[unit * RUNS + run % RUNS] = entries.values[entry]
    index = torch.zeros(num_units * RUNS, dtype=torch.uint8 if has_offsets else torch.int16, device=order.device)
    slots = torch.tensor(SLOTS if has_offsets else range(RUNS), device=order.device)
    index[unit * RUNS + slots[run % RUNS]] = (columns - first[run] if has_offsets else columns).to(index.dtype)
    slab_starts = _starts(num_slabs)
    unit_starts = _starts(widths)[slab_starts]
    return LaneMatrix(
        rows=entries.rows,
        columns=entries.columns,
        lanes=lanes,
        most_units=int(unit_starts.diff().amax()) if entries.rows else 0,
        index=index.view(torch.int64),
        bases=first.to(torch.int16).view(torch.int64) if has_offsets else None,
        values=values.view(-1, RUNS),
        unit_starts=unit_starts.to(torch.int32),
        slab_starts=slab_starts.to(torch.int32),
        order=order.to(torch.int32),
    )


def _cut(entries: SparseMatrix, order: Tensor, lanes: int, *, has_offsets: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(slabs, 9): where the runs of each slab begin and end, row by row; lanes of each slab; slabs of each row."""
    begin, end = entries.starts[:-1][order], entries.starts[1:][order]
    limits = _limits(entries) if has_offsets else None
    wide, counts = [], torch.zeros_like(begin)
    while True:  # slabs of full width, as long as some row goes on behind them
        bounds = _runs(begin, end, lanes, limits)
        goes_on = bounds[:, RUNS] < end
        if not bool(goes_on.any()):
            break
        wide.append(torch.where(goes_on[:, None], bounds, -1))
        counts += goes_on
        begin = torch.where(goes_on, bounds[:, RUNS], begin)
    last, width = _last_slab(begin, end, lanes, limits)
    every = torch.stack([*wide, torch.where((begin < end)[:, None], last, -1)], 1).view(-1, RUNS + 1)
    widths = torch.full((len(order), len(wide) + 1), lanes, device=order.device)
    widths[:, -1] = width
    exists = every[:, 0] >= 0
    return every[exists], widths.view(-1)[exists], counts + (begin < end)


def _runs(begin: Tensor, end: Tensor, lanes: int | Tensor, limits: Tensor | None) -> Tensor:
    """(rows, 9): where the runs of one slab begin and end."""
    bounds = [begin]
    for _ in range(RUNS):
        stop = torch.minimum(bounds[-1] + lanes, end)
        if limits is not None:
            stop = torch.minimum(stop, limits[bounds[-1]])
        bounds.append(stop)
    return torch.stack(bounds, 1)


def _limits(entries: SparseMatrix) -> Tensor:
    """Of each entry, the first behind it, in its row or a later one, that a run from it cannot reach."""
    row = entries.block_rows
    keys = row * (entries.columns + REACH) + entries.places
    limits = torch.searchsorted(keys, keys + REACH)
    return torch.cat([limits, limits.new_full((1,), len(keys))])  # and of a row that begins where all ends


def _last_slab(begin: Tensor, end: Tensor, lanes: int, limits: Tensor | None) -> tuple[Tensor, Tensor]:
    """The narrowest slab of each row that reaches the row's end, and its width."""
    width = torch.full_like(begin, lanes)
    for narrower in range(lanes - 1, 0, -1):
        reaches = _runs(begin, end, narrower, limits)[:, RUNS] == end
        width = torch.where(reaches, narrower, width)
    return _runs(begin, end, width, limits), width


def _starts(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


FORMATS: Mapping[str, Callable[[SparseMatrix], LaneMatrix]] = {
    "offsets": lane_matrix,
    "columns": partial(lane_matrix, has_offsets=False),
}
DENSE = "dense"
