"""Patterns: which positions of a weight may be live, `unstructured`, blocks such as `1x8`, or N:M such as `2:4`.

A pattern reads a weight as a matrix whose rows are outputs. For blocks and N:M its columns are the inputs, kernel
position by kernel position, so that blocks run along the input channels: (out, in, kh, kw) is folded to
(out, kh*kw*in). The full matrix is never built: weights are processed a few rows at a time. A *group* is what is live
or dead as a whole: a single weight, or a block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from growprune.errors import GrowpruneError
from growprune.masks.layers import Weight

CPU_CHUNK, CUDA_CHUNK = 1 << 17, 2_500_000
"""The positions to process at a time: few compared with a model, enough to keep the device busy."""


@dataclass(frozen=True)
class Unstructured:
    """Unstructured sparsity: any position may be live."""

    height: int = 1
    """Rows in a group."""
    width: int = 1
    """Columns in a group."""

    @property
    def name(self) -> str:
        return "unstructured"

    @property
    def is_single(self) -> bool:
        """True if each weight is live or dead independently of its neighbors."""
        return True

    @property
    def bit_pattern(self) -> Pattern:
        """The pattern whose groups have one bit each in a packed mask: blocks, otherwise single weights."""
        return Unstructured()

    def run_length(self, shape: Sequence[int], *, transposed: bool) -> int:
        """Return how many consecutive elements of a parameter (inputs last) are always live or dead together."""
        fits = len(shape) > 1 and shape[1] % self.width == 0 and not transposed
        return self.width if fits and self.height == 1 else 1

    def check(self, weight: Weight, sparsity: float) -> None:
        """Raise if the weight cannot have this pattern at this sparsity."""
        del weight, sparsity

    def num_groups(self, weight: Weight) -> int:
        return weight.numel

    def most_alive(self, weight: Weight) -> int:
        """Return how many groups can be live at once."""
        return self.num_groups(weight)

    def rows_first(self, tensor: Tensor, weight: Weight) -> Tensor:
        """Return a view of the weight with its rows in dimension 0."""
        del weight
        return tensor if tensor.dim() > 1 else tensor.view(-1, 1)

    def fold(self, rows: Tensor) -> Tensor:
        """Fold rows into a matrix."""
        return rows.reshape(rows.shape[0], -1)

    def unfold(self, matrix: Tensor, rows: Tensor) -> Tensor:
        """The inverse of `fold`, for a matrix that came from `rows`."""
        return matrix.view(rows.shape)

    def score(self, matrix: Tensor) -> Tensor:
        """The score of each group, in order, from the values of its weights."""
        return matrix.flatten()

    def alive(self, mask: Tensor) -> Tensor:
        """Return which groups are live, from the mask of a few rows."""
        return mask.flatten()

    def restrict(self, keys: Tensor) -> Tensor:
        """Set the keys to 0 where better neighbors leave no place for a group in the pattern."""
        return keys

    def expand(self, groups: Tensor, rows: int, columns: int) -> Tensor:
        """Return the mask of a few rows, given which of their groups are live."""
        return groups.view(rows, columns)


@dataclass(frozen=True)
class Folded(Unstructured):
    """A pattern along the inputs, kernel position by kernel position."""

    @property
    def is_single(self) -> bool:
        return False

    def rows_first(self, tensor: Tensor, weight: Weight) -> Tensor:
        tensor = super().rows_first(tensor, weight)
        return tensor.transpose(0, 1) if weight.transposed else tensor

    def fold(self, rows: Tensor) -> Tensor:
        return super().fold(rows.movedim(1, -1))

    def unfold(self, matrix: Tensor, rows: Tensor) -> Tensor:
        return matrix.reshape(rows.movedim(1, -1).shape).movedim(-1, 1)


@dataclass(frozen=True)
class Block(Folded):
    """Blocks of `height` outputs x `width` inputs, live or dead as a whole, scored by the sum of their magnitudes.

    Blocks at the edges are padded with zeros.
    """

    @property
    def name(self) -> str:
        return f"{self.height}x{self.width}"

    @property
    def bit_pattern(self) -> Pattern:
        return self

    def num_groups(self, weight: Weight) -> int:
        rows, columns = matrix_shape(weight)
        return -(-rows // self.height) * -(-columns // self.width)

    def score(self, matrix: Tensor) -> Tensor:
        magnitudes = matrix.abs() if matrix.dtype == torch.float64 else matrix.abs().float()
        rows, columns = matrix.shape
        padded = F.pad(magnitudes, (0, -columns % self.width, 0, -rows % self.height))
        down, across = padded.shape[0] // self.height, padded.shape[1] // self.width
        blocks = padded.view(down, self.height, across, self.width)
        cells = blocks.permute(1, 3, 0, 2).reshape(self.height * self.width, down, across)  # by their place in a block
        while (count := len(cells)) > 1:  # by hand: a reduction's order, and so its rounding, depends on the device
            half = -(-count // 2)
            cells[: count - half] += cells[half:]
            cells = cells[:half]
        return cells.flatten()

    def alive(self, mask: Tensor) -> Tensor:
        return mask[:: self.height, :: self.width].flatten()  # the first cell of a block exists, and speaks for all

    def expand(self, groups: Tensor, rows: int, columns: int) -> Tensor:
        blocks = groups.view(-(-rows // self.height), -(-columns // self.width))
        tall = blocks.repeat_interleave(self.height, 0)[:rows]
        return tall.repeat_interleave(self.width, 1)[:, :columns]


@dataclass(frozen=True)
class NofM(Folded):
    """At most `n` of every `m` neighboring inputs are live."""

    n: int = 1
    m: int = 1

    @property
    def name(self) -> str:
        return f"{self.n}:{self.m}"

    def check(self, weight: Weight, sparsity: float) -> None:
        columns = matrix_shape(weight)[1]
        if columns % self.m:
            raise GrowpruneError(
                f"pattern {self.name} needs a multiple of {self.m} inputs, but {weight.name} has {columns}: "
                f"add it to keep_dense"
            )
        least = 1 - self.n / self.m
        if 0 < sparsity < least - 1e-9:  # a plan may compute what it begins with
            raise GrowpruneError(f"sparsity must be >= {least:g} for pattern {self.name} (or 0), got {sparsity:.4g}")

    def most_alive(self, weight: Weight) -> int:
        return weight.numel // self.m * self.n

    def restrict(self, keys: Tensor) -> Tensor:
        windows = keys.view(-1, self.m)
        best_first = windows.argsort(dim=1, descending=True, stable=True)
        return windows.scatter(1, best_first[:, self.n :], 0).flatten()


Pattern = Unstructured


def parse_pattern(text: str | Pattern) -> Pattern:
    """Return the pattern that a string names: `unstructured`, `AxB` or `N:M`.

    >>> parse_pattern("1x8").name, parse_pattern("2:4").name
    ('1x8', '2:4')
    """
    if isinstance(text, Unstructured):
        return text
    if text == "unstructured":
        return Unstructured()
    found = re.fullmatch(r"([1-9][0-9]{0,9})([x:])([1-9][0-9]{0,9})", text) if isinstance(text, str) else None
    if found and found[2] == "x":
        return Block(height=int(found[1]), width=int(found[3]))
    if found and int(found[1]) <= int(found[3]):
        return NofM(n=int(found[1]), m=int(found[3]))
    raise GrowpruneError(
        f"pattern must be 'unstructured', a block like '1x8', or N:M like '2:4' with N <= M, got {repr(text)[:60]}"
    )


def matrix_shape(weight: Weight) -> tuple[int, int]:
    """Return the rows (outputs) and columns (kernel positions x inputs) of a weight as a matrix."""
    rows = weight.shape[1] if weight.transposed else weight.shape[0]
    return rows, weight.numel // rows if rows else 0


def chunk_elements(device: torch.device) -> int:
    return CUDA_CHUNK if device.type == "cuda" else CPU_CHUNK


def row_chunks(pattern: Pattern, tensor: Tensor, weight: Weight) -> tuple[Tensor, ...]:
    """Return views of a few rows each, in order, without splitting groups."""
    view = pattern.rows_first(tensor, weight)
    columns = max(1, view[:1].numel())
    step = max(1, chunk_elements(tensor.device) // columns // pattern.height) * pattern.height
    return view.split(step) if len(view) else ()  # type: ignore[no-untyped-call]


def write_groups(pattern: Pattern, mask: Tensor, weight: Weight, chosen: Iterator[Tensor]) -> None:
    """Fill a mask, given which groups are live, a few rows at a time."""
    for rows, groups in zip(row_chunks(pattern, mask, weight), chosen, strict=True):
        matrix = pattern.expand(groups, rows.shape[0], rows[:1].numel())
        rows.copy_(pattern.unfold(matrix, rows))


def walk_groups(pattern: Pattern, mask: Tensor, weight: Weight) -> Iterator[Tensor]:
    """Yield which groups are live, a few rows at a time: the inverse of `write_groups`."""
    for rows in row_chunks(pattern, mask, weight):
        yield pattern.alive(pattern.fold(rows))


def count_groups(pattern: Pattern, mask: Tensor, weight: Weight) -> Tensor:
    """Count the live groups, as a tensor on the device of the mask, without waiting for the device."""
    return torch.count_nonzero(pattern.alive(pattern.fold(pattern.rows_first(mask, weight))))


def in_one_go(counts: Sequence[Tensor]) -> list[int]:
    """Read numbers from devices, waiting at most once for each device.

    >>> in_one_go([torch.tensor(3), torch.tensor(4)])
    [3, 4]
    """
    return torch.stack([count.to(counts[0].device) for count in counts]).tolist() if counts else []
