"""The live weights of a matrix, row by row: what the formats are made of.

No dense copy is made: masks and bits are looked at a few million weights at a time, on the device they are on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.storage import kernels

CHUNK = 1 << 24
"""How many weights are looked at together: a multiple of the block of `kernels`."""


@dataclass(frozen=True)
class Entries:
    """Compressed rows. `rows` are outputs, `columns` inputs."""

    rows: int
    columns: int
    starts: Tensor
    """int64: where each row begins; one more than there are."""
    places: Tensor
    """int32: the column of each live weight. They rise within a row."""
    values: Tensor

    @property
    def sparsity(self) -> float:
        return 1 - self.values.numel() / max(1, self.rows * self.columns)

    @property
    def lengths(self) -> Tensor:
        return self.starts.diff()

    def dense(self) -> Tensor:
        """The matrix, (rows, columns)."""
        flat = torch.zeros(self.rows * self.columns, dtype=self.values.dtype, device=self.values.device)
        row = torch.repeat_interleave(torch.arange(self.rows, device=flat.device), self.lengths)
        flat[row * self.columns + self.places] = self.values
        return flat.view(self.rows, self.columns)

    def to(self, device: torch.device) -> Entries:
        """On another device."""
        moved = (tensor.to(device) for tensor in (self.starts, self.places, self.values))
        return Entries(self.rows, self.columns, *moved)


def from_dense(weight: Tensor, mask: Tensor | None = None) -> Entries:
    """The entries of a matrix (out, in); without a mask, what is not zero lives.

    >>> from_dense(torch.tensor([[0.0, 2.0], [3.0, 0.0]])).places.tolist()
    [1, 0]
    """
    mask = (weight != 0 if mask is None else mask).detach()
    flat = mask.reshape(-1)
    parts = (flat[i : i + CHUNK].nonzero().view(-1) + i for i in range(0, flat.numel(), CHUNK))
    return _from_positions(weight.detach()[mask], parts, mask.shape)


def from_bits(values: Tensor, bits: Tensor, shape: tuple[int, int] | torch.Size, *, group: int = 1) -> Entries:
    """The entries of compact storage: live values and packed bits, as in `growprune.storage.kernels`.

    Args:
        group: how many consecutive weights a bit stands for.
    """
    num_bits = math.prod(shape) // group
    num_bytes = -(-num_bits // kernels.BLOCK) * kernels.BLOCK // 8
    if len(shape) != 2 or math.prod(shape) % group or num_bytes != bits.numel():
        raise GrowpruneError(f"{bits.numel()} bytes of bits do not fit a matrix of {tuple(shape)} in groups of {group}")
    return _from_positions(values, _live(bits, num_bits, group), shape)


def _live(bits: Tensor, num_bits: int, group: int) -> Iterator[Tensor]:
    within = torch.arange(group, device=bits.device)
    for start in range(0, num_bits, CHUNK):
        stop = min(start + CHUNK, num_bits)
        part = bits[start // 8 : -(-stop // kernels.BLOCK) * kernels.BLOCK // 8]
        position = kernels.unpack(part, stop - start).nonzero() + start
        yield (position * group + within).view(-1)


def _from_positions(values: Tensor, parts: Iterator[Tensor], shape: tuple[int, int] | torch.Size) -> Entries:
    """Live positions of the flat matrix come in order."""
    rows, columns = shape
    device = values.device
    counts = torch.zeros(rows, dtype=torch.int64, device=device)
    places = [torch.zeros(0, dtype=torch.int32, device=device)]
    for part in parts:
        position = part.to(device)
        counts += torch.bincount(position // columns, minlength=rows)
        places.append((position % columns).to(torch.int32))
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    found = torch.cat(places)
    if found.numel() != values.numel():
        raise GrowpruneError(f"there are {values.numel()} values, but {found.numel()} weights live: give one for each")
    return Entries(rows, columns, starts, found, values.detach().reshape(-1))
