"""Exact top-k over one tensor or a list of them, without concatenating or copying them.

What is ranked are integer *keys*, at least 1, where a larger key is better; key 0 marks a position that may not be
chosen. The bits of a non-negative float, read as an integer, sort like the float, so magnitudes make exact keys.
The k-th largest key is found by radix select: count the leading digits of all keys, keep the digit the k-th falls
into, go on with the next digit. Only counts are kept, and the answer is the same on every device.

Ties are broken by flat index: of equal keys, the earlier positions are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from growprune.errors import GrowpruneError

KeyChunks = Callable[[], Iterator[Tensor]]
"""Walks the keys of one tensor in flat order, a chunk at a time; called once per pass. Who walks may overwrite them."""


def num_kept(sparsity: float, total: int) -> int:
    """How many of `total` live at a sparsity: (1 - sparsity) * total, rounded half to even, in exact arithmetic.

    >>> num_kept(0.8, 1000), num_kept(0.95, 10), num_kept(0.85, 10)
    (200, 0, 2)
    """
    return round((1 - Fraction(str(sparsity))) * total)


def chunk_elements(device: torch.device) -> int:
    """How many positions to look at in one go: small beside a model, large enough to keep the device busy."""
    return 2_500_000 if device.type == "cuda" else 1 << 17


def magnitude_keys(values: Tensor) -> Tensor:
    """Integer keys that sort like |values|: their float bits, plus one so that zero has key 1.

    float64 gives 63-bit keys, everything shorter is widened (exactly) to float32 and gives 31-bit keys.

    >>> magnitude_keys(torch.tensor([0.0, -2.0, 1.0])).argsort().tolist()
    [0, 2, 1]
    """
    if values.dtype == torch.float64:
        return values.abs().view(torch.int64).add_(1)
    return values.abs().float().view(torch.int32).add_(1)


def key_bits(dtype: torch.dtype) -> int:
    """How many bits the magnitude keys of a dtype have."""
    return 63 if dtype == torch.float64 else 31


class Threshold(NamedTuple):
    """Where the k largest keys end."""

    key: int
    """The k-th largest key."""
    kept: int
    """How many keys equal to it are among the k largest."""
    equal: int
    """How many keys equal to it there are."""


def kth_largest(
    sources: Sequence[KeyChunks], k: int, *, bits: int = 31, add_up: Callable[[Tensor], Tensor] | None = None
) -> Threshold:
    """The k-th largest key over all sources, for k of at least 1.

    Args:
        add_up: adds counts up over the processes that have other keys of these sources each.
    """
    prefix, remaining, equal, shift = 0, k, 0, bits
    while shift > 0:
        # counts that are sent are few: 2^11 in three passes are a twentieth of the bytes of 2^16 in two
        width = min(shift, _digit_bits(sources) if add_up is None else 11)
        shift -= width
        counts = _count_digits(sources, prefix, shift, width, is_first=shift + width == bits)
        counts = counts if add_up is None else add_up(counts)
        from_top = counts.flip(0).cumsum(0)
        place = int(torch.searchsorted(from_top, remaining))
        if place == counts.numel():
            break
        remaining -= int(from_top[place - 1]) if place else 0
        digit = counts.numel() - 1 - place
        prefix, equal = (prefix << width) | digit, int(counts[digit])
    if prefix == 0:
        raise GrowpruneError(f"{k} positions are asked for, but fewer may be chosen")
    return Threshold(prefix, remaining, equal)


def choose(sources: Sequence[KeyChunks], k: int, *, bits: int = 31) -> Iterator[Iterator[Tensor]]:
    """Which positions hold the k largest keys: for each source, a walk of bool chunks. Take them in order."""
    if k == 0:
        yield from ((torch.zeros_like(chunk, dtype=torch.bool) for chunk in source()) for source in sources)
        return
    key, kept, equal = kth_largest(sources, k, bits=bits)
    ties = Ties(kept)
    for source in sources:
        yield _take(source, (lambda keys: keys >= key) if kept == equal else (lambda keys: ties.take(keys, key)))


def _take(source: KeyChunks, which: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    for keys in source():
        yield which(keys)
        del keys  # before the source makes the next


class Ties:
    """Hands out the places left for keys that equal the threshold, first come first served."""

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self, keys: Tensor, threshold: int) -> Tensor:
        if self.left == 0:
            return keys > threshold
        chosen = keys >= threshold
        tied = (keys == threshold).nonzero(as_tuple=True)[0]
        chosen[tied[self.left :]] = False
        self.left -= min(len(tied), self.left)
        return chosen


def _digit_bits(sources: Sequence[KeyChunks]) -> int:
    """2^16 counters need the fewest passes; on a GPU no more than 2^11 fit the memory it counts fastest in."""
    first = next(_all_chunks(sources), None)
    return 11 if first is not None and first.is_cuda else 16


def _count_digits(sources: Sequence[KeyChunks], prefix: int, shift: int, width: int, *, is_first: bool) -> Tensor:
    """How many keys that begin with `prefix` have each value of the next `width` bits."""
    counts = torch.zeros(1 << width, dtype=torch.int64)
    for keys in _all_chunks(sources):
        counts = counts.to(keys.device)
        digits = keys.bitwise_right_shift_(shift)
        if not is_first:  # the next digit where the key begins with the prefix; anywhere else, a number that is none
            digits -= prefix << width
        counts += _histogram(digits, 1 << width, are_all_digits=is_first)
        del keys, digits  # before the source makes the next
    return counts.cpu()


def _histogram(digits: Tensor, size: int, *, are_all_digits: bool) -> Tensor:
    """How many digits have each value from 0 to size - 1; others are not counted."""
    # histc does not wait for the device, as bincount does; but torch refuses it where only deterministic code may run.
    # What lies above goes into a bin of its own.
    if digits.is_cuda and not torch.are_deterministic_algorithms_enabled():
        return torch.histc(digits, bins=size + 1, min=0, max=size + 1)[:size]
    if not are_all_digits:
        digits = digits[(digits >= 0).logical_and_(digits < size)]
    return torch.bincount(digits, minlength=size)


def _all_chunks(sources: Iterable[KeyChunks]) -> Iterator[Tensor]:
    for source in sources:
        yield from source()
