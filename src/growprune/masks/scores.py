"""What an edit ranks weights by: a magnitude (of values, or of gradients), a signed score, or a random number.

Randomness is a hash of (salt, position), not a stream: any chunk can be made on its own, on any device, and is the
same everywhere, so machines agree on a random mask without sending it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.masks.layers import Weight
from growprune.masks.patterns import Pattern, row_chunks
from growprune.masks.selection import KeyChunks, key_bits, magnitude_keys
from growprune.plan import Action, By, Edit


def check_finite(values: Tensor, weight: Weight) -> None:
    """A NaN or infinity is an error that names the weight."""
    if values.numel() and not all(map(math.isfinite, torch.stack(values.aminmax()).tolist())):
        raise GrowpruneError(f"{weight.name} holds NaN or infinity, so its weights cannot be ranked: training diverged")


def random_keys(start: int, count: int, salt: int, device: torch.device) -> Tensor:
    """30-bit random numbers for positions start .. start+count-1 (splitmix64), plus one."""
    z = torch.arange(start, start + count, device=device, dtype=torch.int64)
    z = z * _signed(0x9E3779B97F4A7C15) + _signed(salt)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ _shift_right(z, shift)) * _signed(factor)
    return (_shift_right(z ^ _shift_right(z, 31), 34) + 1).to(torch.int32)


def salt_of(*what: object) -> int:
    """64 bits that depend on everything named."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "little")


def key_bits_of(edit: Edit, dtype: torch.dtype) -> int:
    """How many bits the keys of an edit have, for weights whose widest float is `dtype`."""
    if edit.by is By.RANDOM:
        return 31
    return key_bits(torch.float64 if edit.by is By.GRASP else dtype)


def signed_keys(scores: Tensor) -> Tensor:
    """63-bit keys that sort like float64 scores, the negative ones too; two that differ in the last bit may tie.

    >>> signed_keys(torch.tensor([0.5, -2.0, -1.0, 0.0])).argsort().tolist()
    [1, 2, 3, 0]
    """
    bits = scores.double().view(torch.int64) >> 1  # the sign stays in front
    return torch.where(bits < 0, -(bits & ((1 << 62) - 1)), bits) + (1 << 62)


def edit_keys(
    edit: Edit,
    weight: Weight,
    pattern: Pattern,
    *,
    values: Callable[[], Tensor],
    mask: Callable[[], Tensor],
    salt: int,
    dtype: torch.dtype,
) -> KeyChunks:
    """The keys of a weight's groups for an edit; 0 for those it may not choose.

    Args:
        values, mask: give the weight's values and mask whenever a pass needs them.
        salt: makes this edit's random numbers its own.
        dtype: the widest float among the weights ranked together, whose keys must be comparable.
    """
    wide = dtype == torch.float64
    always = (1 << key_bits_of(edit, dtype)) - 1  # above the key of every finite float: live weights stay

    def chunks() -> Iterator[Tensor]:
        start = 0
        value_rows = row_chunks(pattern, values(), weight)
        for rows, mask_rows in zip(value_rows, row_chunks(pattern, mask(), weight), strict=True):
            alive = pattern.alive(pattern.fold(mask_rows))
            if edit.by is By.RANDOM:
                keys = random_keys(start, alive.numel(), salt, alive.device)
            elif edit.by is By.GRASP:
                matrix = pattern.fold(rows)  # a pattern adds up magnitudes, so those of both signs apart
                keys = signed_keys(pattern.score(matrix.clamp(min=0)) - pattern.score((-matrix).clamp(min=0)))
            else:
                scores = pattern.score(pattern.fold(rows))
                keys = magnitude_keys(scores.double() if wide else scores)
            start += alive.numel()
            keys = keys.mul_(alive) if edit.action is Action.PRUNE else torch.where(alive, always, keys)
            yield pattern.restrict(keys)
            del alive, keys  # before the next are made

    return chunks


def _shift_right(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)  # >> copies the sign bit; a hash wants zeros


def _signed(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned
