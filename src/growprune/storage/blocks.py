"""The positions of large live blocks of a weight.

For `Linear` layers whose pattern has blocks of a x b, both multiples of 32, that divide the weight evenly. The live
values of compact storage are in row-major order: a row of the weight has the rows of its live blocks one after another,
here called pieces, of b values each. The positions are one flat int32 tensor, recomputed after each edit. With R block
rows, C block columns and n live blocks, numbered row by row:

    R + 1   for each block row, its first live block, and at last n
    C + 1   for each block column, its first in the order column by column, and at last n
    n       row by row: block columns
    n       row by row: block rows
    n       column by column: block rows
    n       column by column: the piece that is a block's first row
    n       column by column: how many pieces further its next row is
    1       unused, so that a lookup of the next block is valid after the last one
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from growprune.masks.patterns import Block, Pattern

PAYS_BELOW = {32: 0.2, 64: 0.3}
"""The highest density at which products use live blocks, by the smaller side of a block."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class LiveBlocks:
    """The positions of the live blocks of a matrix."""

    table: Tensor
    sizes: tuple[int, int, int, int, int]
    """Block rows, block columns, live blocks, and height and width of a block."""

    def __post_init__(self) -> None:
        block_rows, block_columns, num_blocks, height, width = self.sizes
        most = max((density for size, density in PAYS_BELOW.items() if size <= min(height, width)), default=0.0)
        self.pays = num_blocks <= most * block_rows * block_columns
        """True if products over live blocks are faster than with the dense weight."""

    def to(self, device: torch.device) -> LiveBlocks:
        return LiveBlocks(self.table.to(device), self.sizes)

    def clone(self) -> LiveBlocks:
        return LiveBlocks(self.table.clone(), self.sizes)


def block_of(pattern: Pattern, name: str, shape: torch.Size) -> tuple[int, int] | None:
    """Return the height and width of a weight's blocks if there are products for them, else None."""
    height, width = pattern.height, pattern.width
    if not isinstance(pattern, Block) or len(shape) != 2 or height % 32 or width % 32:
        return None
    if shape[0] % height == 0 and shape[1] % width == 0:
        return height, width
    fitting = [f"{side}x{side}" for side in (128, 64, 32) if shape[0] % side == 0 and shape[1] % side == 0]
    log.warning(
        "%s is %dx%d, which blocks of %s do not divide evenly: its products stay dense; %s",
        *(name, *shape, pattern.name),
        f"{' and '.join(fitting)} would fit" if fitting else "no large blocks would fit",
    )
    return None


def live_blocks(mask: Tensor, height: int, width: int) -> LiveBlocks | None:
    """Return the positions of the live blocks of a mask; None if it splits a block.

    >>> live_blocks(torch.eye(2, dtype=torch.bool).repeat_interleave(32, 0).repeat_interleave(32, 1), 32, 32).sizes
    (2, 2, 2, 32, 32)
    """
    block_rows, block_columns = mask.shape[0] // height, mask.shape[1] // width
    counts = mask.view(block_rows, height, block_columns, width).sum((1, 3))
    alive = counts > 0
    if not torch.equal(counts, alive * (height * width)):
        return None
    rows, columns = alive.nonzero(as_tuple=True)
    columns_down, rows_down = alive.t().nonzero(as_tuple=True)
    in_row, rank = alive.sum(1), alive.cumsum(1) - 1  # live blocks of each row, and those before each block
    row_starts, column_starts = _starts(in_row), _starts(alive.sum(0))
    firsts = row_starts[rows_down] * height + rank[rows_down, columns_down]
    nothing = row_starts.new_zeros(1)
    parts = (row_starts, column_starts, columns, rows, rows_down, firsts, in_row[rows_down], nothing)
    sizes = (block_rows, block_columns, rows.numel(), height, width)
    return LiveBlocks(torch.cat(parts).to(torch.int32), sizes)


def _starts(counts: Tensor) -> Tensor:
    return F.pad(counts.cumsum(0), (1, 0))
