"""A sparse matrix as the kernels want it: blocks, row by row, made of live values and their mask.

Rows are outputs. Columns are inputs, kernel position by kernel position, as patterns see them: (out, in, kh, kw) is
folded to (out, kh * kw * in). The dense weight is never made: beside the result there is a mask, and a few rows.
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
    """float32 on the CPU: of each block, height x width."""
    num_alive: int
    """Weights of the mask, whatever their value."""

    @cached_property
    def sparsity(self) -> float:
        return 1 - self.num_alive / max(1, self.rows * self.columns)

    @property
    def block_rows(self) -> Tensor:
        """int64: of each block, its row of blocks."""
        return torch.repeat_interleave(
            torch.arange(len(self.starts) - 1, device=self.starts.device), self.starts.diff()
        )

    def dense(self) -> Tensor:
        """The matrix, (rows, columns)."""
        down, across = -(-self.rows // self.height), -(-self.columns // self.width)
        padded = self.values.new_zeros(down, self.height, across, self.width)
        padded[self.block_rows, :, self.places.long()] = self.values.view(-1, self.height, self.width)
        return padded.view(down * self.height, -1)[: self.rows, : self.columns]

    def to(self, device: torch.device, dtype: torch.dtype) -> SparseMatrix:
        """The same matrix on a device, with values of a dtype: for kernels that compute there in it."""
        moved = {name: getattr(self, name).to(device) for name in ("starts", "places")}
        return dataclasses.replace(self, **moved, values=self.values.to(device, dtype))


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
    live = values.detach().cpu().to(torch.float32).numpy()
    if transposed:
        live = _reordered(live, mask.transpose(0, 1).numpy(), 0, 1)
    live = live if inputs_last else _folded_values(live, mask)
    return _from_folded(live, mask.movedim(1, -1).flatten(1).numpy(), *block_of(pattern))


def block_of(pattern: str | Pattern) -> tuple[int, int]:
    """Height and width of the blocks in which a kernel takes the weights of a pattern.

    >>> block_of("8x1"), block_of("1x16"), block_of("2:4")
    ((8, 1), (1, 8), (1, 1))
    """
    pattern = parse_pattern(pattern) if isinstance(pattern, str) else pattern
    if pattern.height % 8 == 0:
        return 8, 1
    return (1, 8) if pattern.width % 8 == 0 else (1, 1)


def _reordered(live: np.ndarray, mask: np.ndarray, axis: int, place: int) -> np.ndarray:
    """Live values of a mask in the order of the same mask with an axis moved to another place."""
    ranks = mask.cumsum(dtype=np.int64).reshape(mask.shape)
    order = np.moveaxis(ranks, axis, place)[np.moveaxis(mask, axis, place)] - 1
    return np.asarray(live[order])


def _folded_values(live: np.ndarray, mask: Tensor) -> np.ndarray:
    """Live values (out, in, ...) in the order (out, ..., in)."""
    if mask.dim() == 2 or mask[:1, :1].numel() == 1:
        return live
    found, taken = np.empty_like(live), 0
    step = max(1, CHUNK // max(1, mask[:1].numel()))  # ranks of all at once would be larger than the weight
    for start in range(0, mask.shape[0], step):
        some = mask[start : start + step].numpy()
        end = taken + int(np.count_nonzero(some))
        found[taken:end] = _reordered(live[taken:end], some, 1, -1)
        taken = end
    return found


def _from_folded(live: np.ndarray, mask: np.ndarray, height: int, width: int) -> SparseMatrix:
    """The matrix of live values and their mask, (rows, columns), in numpy, which is far faster here than torch."""
    rows, columns = mask.shape
    padded = np.pad(mask, ((0, -rows % height), (0, -columns % width))) if rows % height or columns % width else mask
    blocks = padded.reshape(-(-rows // height), height, -(-columns // width), width)
    alive = padded if height * width == 1 else np.logical_or.reduce(blocks, axis=(1, 3))
    values = live
    if height * width > 1:
        whole = np.broadcast_to(alive[:, None, :, None], blocks.shape)
        if not (blocks == whole).all():  # dead weights of live blocks are zeros
            values = np.zeros(np.count_nonzero(whole), np.float32)
            values[blocks[whole]] = live
    starts = np.zeros(len(alive) + 1, np.int64)
    np.count_nonzero(alive, axis=1).cumsum(out=starts[1:])
    places = (np.flatnonzero(alive) - np.repeat(np.arange(len(alive)) * alive.shape[1], np.diff(starts))).astype("i4")
    values = _by_columns(values, starts, height) if height > 1 else values
    mine = torch.from_numpy(np.array(values))  # and not the module's memory
    tensors = (torch.from_numpy(starts), torch.from_numpy(places), mine)
    return SparseMatrix(rows, columns, height, width, *tensors, live.size)


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
