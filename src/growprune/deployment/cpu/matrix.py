"""A sparse matrix as the kernels want it: blocks, row by row, made of live values and their mask.

Rows are outputs. Columns are inputs, kernel position by kernel position, as patterns see them: (out, in, kh, kw) is
folded to (out, kh * kw * in). The dense weight is never made: beside the result there is a mask, and a few rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from growprune.errors import GrowpruneError
from growprune.masks.patterns import Block, Pattern, Unstructured, parse_pattern

CHUNK = 1 << 20
"""How many weights are looked at together."""
WORTHWHILE = 0.3
"""The sparsity below which a weight counts as dense: no kernel of ours is faster there."""
BLOCKS = (Block(8, 1), Block(1, 8))
"""What a mask of unknown pattern is searched for."""


@dataclass(frozen=True)
class SparseMatrix:
    """Block sparse rows: blocks of 1 x 1, 1 x 8 or 8 x 1, their overhang filled with zeros."""

    rows: int
    columns: int
    height: int
    width: int
    starts: Tensor
    """int64: where in `places` each row of blocks begins; one more than there are."""
    places: Tensor
    """int32: of each block, its first column divided by the width. They rise within a row of blocks."""
    values: Tensor
    """float32: of each block, height x width."""
    num_alive: int
    """Weights of the mask, whatever their value."""

    @cached_property
    def sparsity(self) -> float:
        return 1 - self.num_alive / max(1, self.rows * self.columns)

    def dense(self) -> Tensor:
        """The matrix, (rows, columns)."""
        down, across = -(-self.rows // self.height), -(-self.columns // self.width)
        block_rows = torch.repeat_interleave(torch.arange(down), self.starts.diff())
        padded = torch.zeros(down, self.height, across, self.width)
        padded[block_rows, :, self.places.long()] = self.values.view(-1, self.height, self.width)
        return padded.view(down * self.height, -1)[: self.rows, : self.columns]


def from_dense(
    weight: Tensor, mask: Tensor | None = None, *, pattern: str | Pattern = "unstructured", transposed: bool = False
) -> SparseMatrix:
    """A matrix of a weight (out, in, ...); without a mask, what is not zero lives.

    >>> from_dense(torch.tensor([[0.0, 2.0], [3.0, 0.0]])).values.tolist()
    [2.0, 3.0]
    """
    mask = weight != 0 if mask is None else mask
    return from_live(weight.detach()[mask], mask, pattern=pattern, transposed=transposed)


def from_live(
    values: Tensor,
    mask: Tensor,
    *,
    pattern: str | Pattern = "unstructured",
    transposed: bool = False,
    inputs_last: bool = False,
) -> SparseMatrix:
    """A matrix of live values in row-major order and which weights live, as files and compact storage have them.

    Args:
        mask: bool, shaped like the weight: (out, in, ...).
        pattern: what the mask keeps to. Blocks that are 8 high, or 8 wide, are used as such, others weight by weight.
        transposed: whether the weight is (in, out, ...), as in transformers' Conv1D.
        inputs_last: whether the values are ordered (out, ..., in), as compact storage has blocks of a convolution.
    """
    mask = mask.detach().cpu()
    alive = int(np.count_nonzero(mask.numpy()))  # far faster than torch's
    mask = mask.transpose(0, 1) if transposed else mask
    if mask.dim() < 2 or values.numel() != alive:
        raise GrowpruneError(
            f"{values.numel()} values do not fit a mask of shape {tuple(mask.shape)} with "
            f"{alive} alive: give a mask (out, in, ...), and as many values as live"
        )
    height, width = block_of(pattern)
    live = _in_order(values.detach().cpu().to(torch.float32), mask, transposed=transposed)
    if (found := whole_blocks(live, mask, height, width, inputs_last=inputs_last)) is not None:
        return found
    walk = _by_rows(live, mask, height, inputs_last=inputs_last)
    pieces = [_blocks(weights, rows, height, width) for weights, rows in walk]
    counts, places, blocks = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    rows, columns = mask.shape[0], mask[:1].numel()
    return SparseMatrix(rows, columns, height, width, starts, places, blocks, values.numel())


def block_of(pattern: str | Pattern) -> tuple[int, int]:
    """Height and width of the blocks in which a kernel takes the weights of a pattern.

    >>> block_of("8x1"), block_of("1x16"), block_of("2:4")
    ((8, 1), (1, 8), (1, 1))
    """
    pattern = parse_pattern(pattern) if isinstance(pattern, str) else pattern
    if pattern.height % 8 == 0:
        return 8, 1
    return (1, 8) if pattern.width % 8 == 0 else (1, 1)


def _in_order(values: Tensor, mask: Tensor, *, transposed: bool) -> Tensor:
    """Live values, row by row of outputs; those of a transposed weight come row by row of inputs."""
    if not transposed:
        return values
    places = torch.arange(mask.numel()).view(mask.shape).transpose(0, 1)[mask.transpose(0, 1)]
    return values[places.argsort()]


def _by_rows(live: Tensor, mask: Tensor, height: int, *, inputs_last: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Weights and mask of some rows of outputs at a time, folded to matrices and cut where blocks end."""
    step = max(1, CHUNK // max(1, mask[:1].numel()) // height) * height
    for start in range(0, max(1, mask.shape[0]), step):
        rows = mask[start : start + step]
        rows = rows.movedim(1, -1) if inputs_last else rows
        weights, live = torch.zeros(rows.shape).masked_scatter_(rows, live), live[int(torch.count_nonzero(rows)) :]
        folded = (x if inputs_last else x.movedim(1, -1) for x in (weights, rows))
        weights, rows = (x.reshape(x.shape[0], -1) for x in folded)
        yield weights, rows


def _blocks(weights: Tensor, mask: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """How many blocks live in each row of blocks of a matrix, their places, and their values."""
    overhang = (0, -mask.shape[1] % width, 0, -mask.shape[0] % height)
    weights, mask = (F.pad(x, overhang) for x in (weights, mask))
    down, across = mask.shape[0] // height, mask.shape[1] // width
    alive = mask.view(down, height, across, width).any(3).any(1)
    blocks = weights.view(down, height, across, width).permute(0, 2, 1, 3)[alive]
    return alive.sum(1), alive.nonzero()[:, 1].to(torch.int32), blocks.reshape(-1)


def whole_blocks(live: Tensor, mask: Tensor, height: int, width: int, *, inputs_last: bool) -> SparseMatrix | None:
    """The same matrix in a tenth of the time, by numpy, if no block hangs over and each lives or dies as a whole."""
    folded = mask.movedim(1, -1).flatten(1).numpy()  # (rows, columns)
    rows, columns = folded.shape
    if rows % height or columns % width:
        return None
    blocks = folded.reshape(rows // height, height, columns // width, width)
    alive = np.ascontiguousarray(blocks[:, 0, :, 0])
    if height * width > 1 and not (blocks == alive[:, None, :, None]).all():
        return None
    values = live.numpy() if inputs_last else _folded_values(live.numpy(), mask)
    starts = np.zeros(len(alive) + 1, np.int64)
    np.count_nonzero(alive, axis=1).cumsum(out=starts[1:])
    places = (np.flatnonzero(alive) - np.repeat(np.arange(len(alive)) * alive.shape[1], np.diff(starts))).astype("i4")
    values = _by_columns(values, starts, height) if height > 1 else values
    mine = torch.from_numpy(np.array(values))  # and not the module's memory
    tensors = (torch.from_numpy(starts), torch.from_numpy(places), mine)
    return SparseMatrix(rows, columns, height, width, *tensors, live.numel())


def _folded_values(live: np.ndarray, mask: Tensor) -> np.ndarray:
    """Live values (out, in, ...) in the order (out, ..., in)."""
    if mask.dim() == 2 or mask[0, 0].numel() == 1:
        return live
    found, taken = np.empty_like(live), 0
    step = max(1, CHUNK // max(1, mask[:1].numel()))  # ranks of all at once would be larger than the weight
    for start in range(0, mask.shape[0], step):
        some = mask[start : start + step]
        ranks = some.contiguous().numpy().cumsum(dtype=np.int64).reshape(some.shape)
        order = np.moveaxis(ranks, 1, -1)[some.movedim(1, -1).numpy()] - 1
        found[taken : taken + order.size] = live[taken + order]
        taken += order.size
    return found


def _by_columns(values: np.ndarray, starts: np.ndarray, height: int) -> np.ndarray:
    """Live values, row by row, as blocks of one column: those of each row of blocks are turned on their side."""
    counts = np.diff(starts)
    row, first = np.repeat(counts, counts), np.repeat(starts[:-1], counts)
    place = (height - 1) * first + np.arange(starts[-1])  # of the first value of each block
    return values[place[:, None] + row[:, None] * np.arange(height)].reshape(-1)


def matrix_of_zeros(weight: Tensor, *, transposed: bool = False) -> SparseMatrix:
    """The matrix of a weight whose zeros are dead, in blocks if it is made of whole ones."""
    mask = weight != 0
    pattern = pattern_of(mask.t() if transposed else mask)
    return from_live(weight[mask], mask, pattern=pattern, transposed=transposed)


def matrix_of_all(weight: Tensor) -> SparseMatrix:
    """The matrix of a weight that is dense."""
    return from_dense(weight, torch.ones(weight.shape, dtype=torch.bool))


def pattern_of(mask: Tensor) -> Pattern:
    """Blocks, if the live weights (out, in, ...) fill them, but for the odd weight that is zero by chance."""
    folded = mask.movedim(1, -1).flatten(1)
    for blocks in BLOCKS:
        rows, columns = (
            size // step * step for size, step in zip(folded.shape, (blocks.height, blocks.width), strict=True)
        )
        if not rows or not columns:
            continue
        cut = folded[:rows, :columns].view(rows // blocks.height, blocks.height, -1, blocks.width)
        alive = cut.any(3).any(1)
        if int(alive.sum()) * 8 <= 1.02 * int(cut.sum()):
            return blocks
    return Unstructured()
