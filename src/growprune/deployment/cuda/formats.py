"""The format of a sparse matrix on a GPU: rows cut for the lanes of a warp.

A *unit* is eight live weights of one row, which one lane of the GPU takes: 16 bytes of bfloat16 in one load. A *slab*
is as many units as lanes share a row, and eight *runs* across them: entry `i` of run `j` is the `j`-th weight of unit
`i`. A run is *consecutive* live weights, so when all lanes read x at their `j`-th column, they read neighbours: at 90 %
sparsity 16 lanes touch 3 cache lines instead of 16. This is the limit of such a kernel once its loads are wide: an H200
brings 20 bytes a cycle to a multiprocessor, 5 to 6 weights, but looks up only 4 cache lines a cycle.

A weight has an 8-bit offset from the column at which its run begins, and a run has 16 bits for that column. With 16
lanes this is 3.1 bytes a weight in bfloat16, 6.4 times fewer than dense at 90 %. A run ends early where the next column
is 256 away or more, and is filled up with zeros: less than 1 % at 90 %. Gaps from weight to weight would need a prefix
sum across lanes; offsets need one addition. 16-bit columns, 4 bytes a weight, were about 10 % slower at 90 %.

The last slab of a row is as narrow as it can be, so at most seven zeros are added to a row, plus those of short runs.
Rows lie sorted by length, longest first, so that those of one program are alike; `order` says where they belong.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from growprune.deployment.cpu.matrix import SparseMatrix
from growprune.errors import GrowpruneError

RUNS = 8
"""Runs of a slab, and so weights of a unit."""
REACH = 256
"""How far apart the first and the last column of a run may be: what eight bits hold."""
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
    offsets: Tensor
    """int64, one word for each unit: eight bytes, in the order of `SLOTS`."""
    bases: Tensor
    """int64, two words for each slab: the first columns of its eight runs, 16 bits each."""
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
        tensors = (self.offsets, self.bases, self.values, self.unit_starts, self.slab_starts, self.order)
        return sum(tensor.nbytes for tensor in tensors)

    def dense(self) -> Tensor:
        """The matrix, (rows, columns)."""
        flat = torch.zeros(self.rows * self.columns, dtype=self.values.dtype, device=self.values.device)
        unit_rows = torch.repeat_interleave(self.order.long(), self.unit_starts.diff().long())
        # what is filled up adds a zero to some weight of the row
        flat.index_add_(0, (unit_rows[:, None] * self.columns + self.places()).view(-1), self.values.reshape(-1))
        return flat.view(self.rows, self.columns)

    def places(self) -> Tensor:
        """int64 (units, 8): the columns."""
        offsets = self.offsets.view(torch.uint8).view(-1, RUNS)[:, list(SLOTS)].long()
        starts, slabs = self.unit_starts.long(), self.slab_starts.long()
        row = torch.repeat_interleave(torch.arange(self.rows, device=starts.device), starts.diff())
        slab = slabs[row] + (torch.arange(len(offsets), device=starts.device) - starts[row]) // self.lanes
        return offsets + (self.bases.view(torch.int16).view(-1, RUNS).long() & 0xFFFF)[slab]


def lane_matrix(entries: SparseMatrix, *, lanes: int = 16) -> LaneMatrix:
    """Lay live weights out for the lanes. Values keep their dtype.

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
    run = torch.repeat_interleave(torch.arange(len(begins), device=bounds.device), lengths)  # of each live weight
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
    # of each entry, the first one behind it, in its row or a later one, that a run from it cannot reach
    keys = entries.block_rows * (entries.columns + REACH) + entries.places
    limits = torch.searchsorted(keys, keys + REACH)
    limits = torch.cat([limits, limits.new_full((1,), len(keys))])  # and of a row that begins where all ends
    wide, counts = [], torch.zeros_like(begin)
    while True:  # slabs of full width, as long as some row goes on behind them
        bounds = _runs(begin, end, lanes, limits)
        goes_on = bounds[:, RUNS] < end
        if not bool(goes_on.any()):
            break
        wide.append(torch.where(goes_on[:, None], bounds, -1))
        counts += goes_on
        begin = torch.where(goes_on, bounds[:, RUNS], begin)
    width = torch.full_like(begin, lanes)  # of the last slab: the narrowest that reaches the end of the row
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
