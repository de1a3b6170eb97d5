"""The mask of a tensor, as bits and as gaps: what a sparse file stores, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.files.entries import GAP_DTYPES, MAX_EXPANSION, Entry
from growprune.masks.bits import pack, unpack
from growprune.masks.layers import Weight
from growprune.masks.patterns import Pattern, walk_groups, write_groups

CHUNK = 1 << 22
"""How many bits are looked at in one go: a whole number of bytes, so that chunks of bits are slices."""


def num_bits(weights: Sequence[Weight], pattern: Pattern) -> int:
    return sum(pattern.bit_pattern.num_groups(weight) for weight in weights)


def num_mask_bytes(weights: Sequence[Weight], pattern: Pattern) -> int:
    return -(-num_bits(weights, pattern) // 8)


def pack_mask(mask: Tensor, weights: Sequence[Weight], pattern: Pattern, name: str) -> Tensor:
    """The bits of a mask, as a file stores them."""
    bits_of = pattern.bit_pattern
    walks = (walk_groups(bits_of, weight.of(mask), weight) for weight in weights)
    none = torch.zeros(0, dtype=torch.bool)
    packed = pack(torch.cat([none, *(groups.cpu() for walk in walks for groups in walk)]))
    if not torch.equal(unpack_mask(packed, tuple(mask.shape), weights, pattern), mask.cpu()):
        raise GrowpruneError(f"the mask of {name} does not keep to pattern {pattern.name}: prune it before saving")
    return packed


def unpack_mask(packed: Tensor, shape: tuple[int, ...], weights: Sequence[Weight], pattern: Pattern) -> Tensor:
    bits_of = pattern.bit_pattern
    bits = unpack(packed, (num_bits(weights, pattern),))
    if has_one_bit_a_weight(weights, pattern, shape):
        return bits.view(shape)
    mask = torch.ones(shape, dtype=torch.bool)
    for weight in weights:
        view, size = weight.of(mask), bits_of.num_groups(weight)
        write_groups(bits_of, view, weight, _cut_like(walk_groups(bits_of, view, weight), bits[:size]))
        bits = bits[size:]
    return mask


def has_one_bit_a_weight(weights: Sequence[Weight], pattern: Pattern, shape: Sequence[int]) -> bool:
    """Whether the bits of a file are those of all weights in row-major order."""
    whole_rows = sum(weight.numel for weight in weights) == int(np.prod(shape, dtype=object))
    return pattern.bit_pattern.is_single and whole_rows


def _cut_like(walk: Iterator[Tensor], flat: Tensor) -> Iterator[Tensor]:
    """A flat tensor, cut like a walk."""
    start = 0
    for chunk in walk:
        yield flat[start : start + chunk.numel()]
        start += chunk.numel()


def to_gaps(bits: Tensor, entry: Entry, pattern: Pattern) -> Tensor | None:
    """The same mask as gaps, where those take at most half the bytes; of uint8 or uint16, which is the shorter."""
    num_live = entry.nnz - entry.num_outside
    if not pattern.bit_pattern.is_single or not 0 < num_live <= bits.numel() // 2:
        return None
    distances = np.diff(_positions(bits, num_live), prepend=-1)
    lengths = {dtype: _num_gaps(distances, dtype) for dtype in GAP_DTYPES}
    dtype = min(lengths, key=lambda dtype: lengths[dtype] * dtype.itemsize)
    num_bytes = lengths[dtype] * dtype.itemsize
    is_bounded = entry.num_bytes <= MAX_EXPANSION * (num_bytes + entry.nnz * entry.dtype.itemsize)
    return _write_gaps(distances, dtype) if num_bytes <= bits.numel() // 2 and is_bounded else None


def _positions(bits: Tensor, num_live: int) -> np.ndarray:
    found = np.empty(num_live, np.int64)
    taken = 0
    for start in range(0, bits.numel(), CHUNK // 8):
        live = _set_bits(bits[start : start + CHUNK // 8])
        found[taken : taken + live.size] = live + 8 * start
        taken += live.size
    return found


def _set_bits(bits: Tensor) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(bits.numpy(), bitorder="little").view(np.bool_))  # bools are searched faster


def _longest(dtype: torch.dtype) -> int:
    return (1 << 8 * dtype.itemsize) - 1


def _num_gaps(distances: np.ndarray, dtype: torch.dtype) -> int:
    return int(distances.size + ((distances - 1) // _longest(dtype)).sum())


def _write_gaps(distances: np.ndarray, dtype: torch.dtype) -> Tensor:
    longest = _longest(dtype)
    skips, gaps = np.divmod(distances - 1, longest)
    found = np.full(_num_gaps(distances, dtype), longest, f"<u{dtype.itemsize}")
    found[np.arange(skips.size) + skips.cumsum()] = gaps
    return torch.from_numpy(found)


def from_gaps(gaps: Tensor, count: int) -> Tensor:
    """The bits, of which there are so many; raises if the gaps lead beyond their end."""
    bits = np.zeros(-(-count // 8), np.uint8)
    longest, end = _longest(gaps.dtype), 0
    for start in range(0, gaps.numel(), CHUNK // 32):
        some = gaps[start : start + CHUNK // 32].numpy()
        lives = some != longest
        ends = end + (some + lives.astype(np.int64)).cumsum()  # behind each live bit, or behind so many dead ones
        end = int(ends[-1])
        if end > count:
            raise GrowpruneError(f"gaps that lead to bit {end} of {count}")
        _set(bits, ends[lives] - 1)
    return torch.from_numpy(bits)


def _set(bits: np.ndarray, positions: np.ndarray) -> None:
    if positions.size:
        first, last = positions[0] // 8, positions[-1] // 8
        bools = np.zeros(8 * (last - first + 1), np.bool_)
        bools[positions - 8 * first] = True
        bits[first : last + 1] |= np.packbits(bools, bitorder="little")


def row_major(bits: Tensor, entry: Entry, pattern: Pattern) -> Tensor:
    """One bit for each weight of a parameter, in row-major order, from the bits that a file has of it."""
    if has_one_bit_a_weight(entry.weights, pattern, entry.shape):
        return bits
    run = pattern.run_length(entry.shape, transposed=entry.weights[0].transposed)
    if run % 8 == 0 and len(entry.shape) == 2 and not entry.num_outside:  # a bit becomes some whole bytes
        count = num_bits(entry.weights, pattern)
        octets = np.unpackbits(bits.numpy(), count=count, bitorder="little") * np.uint8(255)
        return torch.from_numpy(octets if run == 8 else octets.repeat(run // 8))
    return pack(unpack_mask(bits, entry.shape, entry.weights, pattern))


def scatter(values: Tensor, bits: Tensor, count: int) -> Tensor:
    """So many elements, dense and flat: where a bit is set the next value, and 0 elsewhere.

    >>> scatter(torch.tensor([5.0, 6.0]), torch.tensor([10], dtype=torch.uint8), 4).tolist()
    [0.0, 5.0, 0.0, 6.0]
    """
    dense = torch.zeros(count, dtype=values.dtype)
    to, live = (t.contiguous().view(torch.uint8).numpy().view(f"V{values.itemsize}") for t in (dense, values))
    taken = 0
    for start in range(0, count, CHUNK // 4):
        positions = _set_bits(bits[start // 8 : (start + CHUNK // 4) // 8])
        to[start + positions] = live[taken : taken + positions.size]
        taken += positions.size
    return dense
