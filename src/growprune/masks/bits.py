"""Masks as bits: packed in memory, and as a sparse file stores them, which may be as the gaps between set bits.

The format of files is specified in docs/file-format.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.masks.layers import Weight
from growprune.masks.patterns import Pattern, walk_groups, write_groups

Snapshot: TypeAlias = dict[str, tuple[Tensor, Tensor | None]]
"""By name: values, and the packed mask if the tensor is prunable."""


def pack(mask: Tensor) -> Tensor:
    """Pack a bool tensor into bytes: row-major, eight to a byte, the first in the lowest bit.

    >>> pack(torch.tensor([True, False, True, True, False, False, False, False, True])).tolist()
    [13, 1]
    """
    if mask.device.type == "cpu":
        return torch.from_numpy(np.packbits(mask.reshape(-1).numpy(), bitorder="little"))
    flat = torch.nn.functional.pad(mask.reshape(-1), (0, -mask.numel() % 8)).view(-1, 8).to(torch.uint8)
    return (flat << torch.arange(8, device=mask.device, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor. If it is sharded, this is a collective: all ranks have to call it."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def like(tensor: Tensor, values: Tensor) -> Tensor:
    """Shard values that all ranks have like a tensor; return them unchanged if it is not sharded."""
    if not hasattr(tensor, "device_mesh"):
        return values
    from torch.distributed.tensor import distribute_tensor

    here = values.to(tensor.device)
    return distribute_tensor(here, tensor.device_mesh, tensor.placements, src_data_rank=None)  # type: ignore[attr-defined]


def check_packed(packed: Tensor, shape: Sequence[int]) -> None:
    """Raise unless a packed mask has the number of bytes for this shape."""
    if packed.dtype != torch.uint8:
        raise GrowpruneError(f"a packed mask must be of dtype torch.uint8, got {packed.dtype}")
    if packed.numel() != -(-math.prod(shape) // 8):
        raise GrowpruneError(f"a mask of {packed.numel()} bytes does not fit shape {tuple(shape)}")


def unpack(packed: Tensor, shape: Sequence[int], device: torch.device | None = None) -> Tensor:
    """The inverse of `pack`, for a mask of this shape.

    >>> unpack(torch.tensor([13, 1], dtype=torch.uint8), (9,)).int().tolist()
    [1, 0, 1, 1, 0, 0, 0, 0, 1]
    """
    check_packed(packed, shape)
    packed = packed.to(device) if device is not None else packed
    if packed.device.type == "cpu":
        bools = np.unpackbits(packed.numpy(), count=math.prod(shape), bitorder="little").view(np.bool_)
        return torch.from_numpy(bools).view(tuple(shape))
    bits = (packed[:, None] >> torch.arange(8, device=packed.device, dtype=torch.uint8)) & 1
    return bits.reshape(-1)[: math.prod(shape)].bool().view(tuple(shape))


GAP_DTYPES = (torch.uint8, torch.uint16)

MAX_EXPANSION = 1000
"""The most a tensor may grow when it is read: dense bytes per byte in the file.

It limits gap-encoded tensors, because a few gaps can span many weights, and files that are read without their model.
"""


def encode_mask(
    mask: Tensor, weights: Sequence[Weight], pattern: Pattern, itemsize: int, name: str, *, value_bytes: int
) -> tuple[Tensor, Tensor | None]:
    """Return the bits of a mask, and its gaps if a file stores those instead.

    Args:
        itemsize: bytes per value of the parameter.
        name: the parameter, for errors.
        value_bytes: the bytes of its values in the file.
    """
    bits = pack_mask(mask, weights, pattern, name)
    num_live = int(torch.count_nonzero(mask)) - num_outside(mask.shape, weights)
    least = -(-mask.numel() * itemsize // MAX_EXPANSION) - value_bytes
    return bits, to_gaps(bits, num_live, least_bytes=least) if pattern.bit_pattern.is_single else None


def num_outside(shape: Sequence[int], weights: Sequence[Weight]) -> int:
    """Return how many elements of a parameter belong to no matrix and are always live."""
    return math.prod(shape) - sum(weight.numel for weight in weights)


def num_bits(weights: Sequence[Weight], pattern: Pattern) -> int:
    return sum(pattern.bit_pattern.num_groups(weight) for weight in weights)


def num_mask_bytes(weights: Sequence[Weight], pattern: Pattern) -> int:
    return -(-num_bits(weights, pattern) // 8)


def pack_mask(mask: Tensor, weights: Sequence[Weight], pattern: Pattern, name: str) -> Tensor:
    """Return the bits of a mask, as a file stores them."""
    bits_of = pattern.bit_pattern
    walks = (walk_groups(bits_of, weight.of(mask), weight) for weight in weights)
    none = torch.zeros(0, dtype=torch.bool)
    packed = pack(torch.cat([none, *(groups.cpu() for walk in walks for groups in walk)]))
    if not torch.equal(unpack_mask(packed, tuple(mask.shape), weights, pattern), mask.cpu()):
        raise GrowpruneError(f"the mask of {name} does not have the pattern {pattern.name}: call prune() before saving")
    return packed


def unpack_mask(packed: Tensor, shape: tuple[int, ...], weights: Sequence[Weight], pattern: Pattern) -> Tensor:
    bits_of = pattern.bit_pattern
    bits = unpack(packed, (num_bits(weights, pattern),))
    if has_one_bit_a_weight(weights, pattern, shape):
        return bits.view(shape)
    mask = torch.ones(shape, dtype=torch.bool)
    for weight in weights:
        view, size = weight.of(mask), bits_of.num_groups(weight)
        sizes = [len(groups) for groups in walk_groups(bits_of, view, weight)]
        write_groups(bits_of, view, weight, iter(bits[:size].split(sizes)))  # type: ignore[no-untyped-call]
        bits = bits[size:]
    return mask


def has_one_bit_a_weight(weights: Sequence[Weight], pattern: Pattern, shape: Sequence[int]) -> bool:
    """True if the bits of a file are those of all weights in row-major order."""
    return pattern.bit_pattern.is_single and not num_outside(shape, weights)


def to_gaps(bits: Tensor, num_live: int, *, least_bytes: int = 0) -> Tensor | None:
    """Return the gaps between set bits, in the shorter of the two dtypes; None unless they halve the bytes.

    Args:
        num_live: the number of set bits.
        least_bytes: also return None if the gaps take fewer bytes than this.
    """
    if not 0 < num_live <= bits.numel() // 2:
        return None
    live = np.flatnonzero(np.unpackbits(bits.numpy(), bitorder="little").view(np.bool_))  # bools are searched faster
    zeros = np.diff(live, prepend=-1) - 1  # before each
    numbers = {dtype: zeros.size + int((zeros // _longest(dtype)).sum()) for dtype in GAP_DTYPES}
    dtype = min(numbers, key=lambda dtype: numbers[dtype] * dtype.itemsize)
    if not least_bytes <= numbers[dtype] * dtype.itemsize <= bits.numel() // 2:
        return None
    skips, gaps = np.divmod(zeros, _longest(dtype))
    found = np.full(numbers[dtype], _longest(dtype), f"<u{dtype.itemsize}")
    found[np.arange(skips.size) + skips.cumsum()] = gaps
    return torch.from_numpy(found)


def _longest(dtype: torch.dtype) -> int:
    return (1 << 8 * dtype.itemsize) - 1


def from_gaps(gaps: Tensor, count: int) -> Tensor:
    """Return the `count` bits that the gaps encode. Raise if the gaps go beyond them."""
    sizes = gaps.numpy()
    lives = sizes != _longest(gaps.dtype)
    ends = (sizes + lives.astype(np.int64)).cumsum()  # the bit after each gap and its live bit
    if ends.size and ends[-1] > count:
        raise GrowpruneError(f"gaps that reach bit {ends[-1]} of {count}")
    bools = np.zeros(count, np.bool_)
    bools[ends[lives] - 1] = True
    return torch.from_numpy(np.packbits(bools, bitorder="little"))


def row_major(bits: Tensor, shape: tuple[int, ...], weights: Sequence[Weight], pattern: Pattern) -> Tensor:
    """Return one bit per weight of a parameter, in row-major order, from the bits that a file stores."""
    if has_one_bit_a_weight(weights, pattern, shape):
        return bits
    run = pattern.run_length(shape, transposed=weights[0].transposed)
    if run % 8 == 0 and len(shape) == 2 and not num_outside(shape, weights):  # a bit becomes whole bytes
        count = num_bits(weights, pattern)
        octets = np.unpackbits(bits.numpy(), count=count, bitorder="little") * np.uint8(255)
        return torch.from_numpy(octets if run == 8 else octets.repeat(run // 8))
    return pack(unpack_mask(bits, shape, weights, pattern))
