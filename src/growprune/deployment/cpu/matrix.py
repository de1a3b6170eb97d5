"""The sparse matrix format of the kernels: blocks, row by row, made from a weight and its mask.

Rows are outputs. Columns are inputs, ordered by kernel position as in patterns: (out, in, kh, kw) is folded to
(out, kh * kw * in).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.masks.patterns import Block, Pattern, Unstructured, parse_pattern

WORTHWHILE = 0.3
"""The sparsity below which a weight counts as dense, because none of our kernels is faster there."""
BLOCKS = (Block(8, 1), Block(1, 8))
"""The block patterns to look for in a mask of unknown pattern."""


@dataclass(frozen=True)
class SparseMatrix:
    """Block sparse rows with blocks of 1 x 1, 1 x 8 or 8 x 1. Blocks at the edges are padded with zeros."""

    rows: int
    columns: int
    height: int
    width: int
    starts: Tensor
    """int64: where in `places` each row of blocks begins, and the end of the last."""
    places: Tensor
    """int32: the first column of each block divided by the block width, ascending in each row of blocks."""
    values: Tensor
    """The height x width values of each block, float32 on the CPU."""
    num_alive: int
    """Number of weights in the mask, including weights of value 0."""

    @cached_property
    def sparsity(self) -> float:
        return 1 - self.num_alive / max(1, self.rows * self.columns)

    @property
    def block_rows(self) -> Tensor:
        """int64: the row of blocks that each block is in."""
        return torch.repeat_interleave(
            torch.arange(len(self.starts) - 1, device=self.starts.device), self.starts.diff()
        )

    def dense(self) -> Tensor:
        """Return the dense matrix, (rows, columns)."""
        down, across = -(-self.rows // self.height), -(-self.columns // self.width)
        padded = self.values.new_zeros(down, self.height, across, self.width)
        padded[self.block_rows, :, self.places.long()] = self.values.view(-1, self.height, self.width)
        return padded.view(down * self.height, -1)[: self.rows, : self.columns]

    def to(self, device: torch.device, dtype: torch.dtype) -> SparseMatrix:
        """Return the matrix on a device, with its values in a dtype."""
        moved = {name: getattr(self, name).to(device) for name in ("starts", "places")}
        return dataclasses.replace(self, **moved, values=self.values.to(device, dtype))


def from_dense(
    weight: Tensor, mask: Tensor | None = None, *, pattern: str | Pattern = "unstructured", transposed: bool = False
) -> SparseMatrix:
    """Return the matrix of a weight (out, in, ...). Without a mask, all non-zero weights are kept.

    Args:
        pattern: the pattern of the mask. Blocks of 8 x 1 or 1 x 8 are used if they fit in it, else single weights.
        transposed: whether the weight is (in, out, ...), as in transformers' Conv1D.

    >>> from_dense(torch.tensor([[0.0, 2.0], [3.0, 0.0]])).values.tolist()
    [2.0, 3.0]
    """
    weight = weight.detach()
    mask = weight != 0 if mask is None else mask
    if weight.dim() < 2 or mask.shape != weight.shape:
        raise GrowpruneError(
            f"a mask of shape {tuple(mask.shape)} does not fit a weight of shape {tuple(weight.shape)}: give both as "
            f"(out, in, ...)"
        )
    dense, lives = (_folded(tensor, transposed) for tensor in (weight.to("cpu", torch.float32), mask.cpu()))
    rows, columns = dense.shape
    height, width = block_of(pattern)
    num_alive = int(np.count_nonzero(lives))
    if height * width == 1:
        alive, values = lives, dense[lives]
    else:  # pruned weights in blocks that are kept, and padding, are zeros
        overhang = (0, -rows % height), (0, -columns % width)
        down, across = -(-rows // height), -(-columns // width)
        cut = (down, height, across, width)
        alive = np.logical_or.reduce(np.pad(lives, overhang).reshape(cut), axis=(1, 3))
        padded = np.pad(np.where(lives, dense, np.float32(0)), overhang).reshape(cut)
        values = padded.transpose(0, 2, 1, 3)[alive].reshape(-1)
    starts = np.zeros(len(alive) + 1, np.int64)
    np.count_nonzero(alive, axis=1).cumsum(out=starts[1:])
    places = (np.flatnonzero(alive) - np.repeat(np.arange(len(alive)) * alive.shape[1], np.diff(starts))).astype("i4")
    in_order, of_blocks, numbers = map(torch.from_numpy, (starts, places, values))
    return SparseMatrix(rows, columns, height, width, in_order, of_blocks, numbers, num_alive)


def _folded(tensor: Tensor, transposed: bool) -> np.ndarray:
    """Fold a weight (out, in, ...) to a matrix in numpy, which is much faster here than torch."""
    tensor = tensor.transpose(0, 1) if transposed else tensor
    return np.ascontiguousarray(tensor.movedim(1, -1).flatten(1).numpy())


def block_of(pattern: str | Pattern) -> tuple[int, int]:
    """Return the height and width of the blocks that the kernels use for a pattern.

    >>> block_of("8x1"), block_of("1x16"), block_of("2:4")
    ((8, 1), (1, 8), (1, 1))
    """
    pattern = parse_pattern(pattern) if isinstance(pattern, str) else pattern
    if pattern.height % 8 == 0:
        return 8, 1
    return (1, 8) if pattern.width % 8 == 0 else (1, 1)


def pattern_of(mask: Tensor) -> Pattern:
    """Return a block pattern if the mask (out, in, ...) fills at least 98 % of its blocks, else Unstructured."""
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
