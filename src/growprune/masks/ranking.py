"""Rank weights for an edit: integer keys for their groups, and an exact top-k over the keys of many weights.

A key is at least 1, and a larger key is better; key 0 marks a position that may not be chosen. The bits of a
non-negative float, read as an integer, sort like the float, so magnitudes make exact keys. Random keys are a hash of
(salt, position), not a stream: any chunk can be made on its own, on any device, and is the same everywhere, so machines
agree on a random mask without sending it.

The k-th largest key is found by radix select: count the leading digits of all keys, keep the digit of the k-th,
continue with the next digit. Keys are processed in chunks and never concatenated. Only counts are kept, and
the answer is the same on every device. Ties are broken by flat index: of equal keys, the earlier positions are chosen.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.masks.layers import Weight
from growprune.masks.patterns import Pattern, in_one_go, row_chunks
from growprune.plan import Action, By, Edit

KeyChunks = Callable[[], Iterator[Tensor]]
"""Yield the keys of one tensor in flat order, a chunk at a time. Called once per pass; callers may overwrite chunks."""


def check_finite(values: Tensor, weight: Weight) -> None:
    """Raise an error that names the weight if it has a NaN or infinity."""
    if values.numel() and not all(map(math.isfinite, torch.stack(values.aminmax()).tolist())):
        raise GrowpruneError(f"{weight.name} has NaN or infinity, so it cannot be pruned by rank: training diverged")


# Keys


def magnitude_keys(values: Tensor) -> Tensor:
    """Return integer keys that sort like |values|: their float bits, plus one so that zero has key 1.

    Keys of float64 have 63 bits. Shorter floats are widened (exactly) to float32, with keys of 31 bits. A NaN, whose
    bits plus one could overflow, sorts above infinity and below the largest key.

    >>> magnitude_keys(torch.tensor([0.0, -2.0, 1.0])).argsort().tolist()
    [0, 2, 1]
    """
    if values.dtype == torch.float64:
        return values.abs().view(torch.int64).clamp_(max=(1 << 63) - 3).add_(1)
    return values.abs().float().view(torch.int32).clamp_(max=(1 << 31) - 3).add_(1)


def signed_keys(scores: Tensor) -> Tensor:
    """Return 63-bit keys that sort like float64 scores of either sign. Two that differ in the last bit may tie.

    >>> signed_keys(torch.tensor([0.5, -2.0, -1.0, 0.0])).argsort().tolist()
    [1, 2, 3, 0]
    """
    bits = scores.double().view(torch.int64) >> 1  # the sign stays in front
    return torch.where(bits < 0, -(bits & ((1 << 62) - 1)), bits) + (1 << 62)


def random_keys(start: int, count: int, salt: int, device: torch.device) -> Tensor:
    """Return 30-bit random numbers for positions start .. start+count-1 (splitmix64), plus one."""
    z = torch.arange(start, start + count, device=device, dtype=torch.int64)
    z = z * STEP + _signed(salt)
    for shift, factor in MIXING:
        z = (z ^ _shift_right(z, shift)) * factor
    return (_shift_right(z ^ _shift_right(z, 31), 34) + 1).to(torch.int32)


def _shift_right(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)  # >> copies the sign bit; a hash wants zeros


def _signed(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


STEP, MIXING = _signed(0x9E3779B97F4A7C15), ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))
"""The constants of splitmix64."""


def salt_of(*what: object) -> int:
    """Hash all arguments into 64 bits."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "little")


def _is_signed(edit: Edit) -> bool:
    """True if scores of either sign decide, not magnitudes."""
    return edit.by is By.GRASP or edit.score is not None


def key_bits_of(edit: Edit, dtype: torch.dtype) -> int:
    """Return the number of bits of an edit's keys, for weights whose widest float is `dtype`."""
    if edit.by is By.RANDOM:
        return 31
    return 63 if _is_signed(edit) or dtype == torch.float64 else 31


def edit_keys(
    edit: Edit,
    weight: Weight,
    pattern: Pattern,
    *,
    read: Callable[[Weight], tuple[Tensor, Tensor]],
    salt: int,
    dtype: torch.dtype,
    factor: float = 1.0,
) -> KeyChunks:
    """Return the keys of a weight's groups for an edit; 0 for groups that it may not choose.

    Args:
        read: returns a weight's values and mask; called once per pass.
        salt: the seed of this edit's random numbers.
        dtype: the widest float among the weights ranked together, whose keys must be comparable.
        factor: multiplies scores that are not random.
    """
    wide, is_signed = dtype == torch.float64, _is_signed(edit)
    always = (1 << key_bits_of(edit, dtype)) - 1  # above the key of every finite float: live weights stay

    def chunks() -> Iterator[Tensor]:
        start = 0
        values, mask = read(weight)
        rows_of_both = zip(row_chunks(pattern, values, weight), row_chunks(pattern, mask, weight), strict=True)
        for rows, mask_rows in rows_of_both:
            alive = pattern.alive(pattern.fold(mask_rows))
            if edit.by is By.RANDOM:
                keys = random_keys(start, alive.numel(), salt, alive.device)
            elif is_signed:  # a pattern adds up magnitudes, so those of both signs apart
                matrix = pattern.fold(rows.double() * factor)
                keys = signed_keys(pattern.score(matrix.clamp(min=0)) - pattern.score((-matrix).clamp(min=0)))
            else:
                scores = pattern.score(pattern.fold(rows))
                scores = scores if factor == 1 else scores.to(dtype) * factor
                keys = magnitude_keys(scores.double() if wide else scores)
            start += alive.numel()
            keys = keys.mul_(alive) if edit.action is Action.PRUNE else torch.where(alive, always, keys)
            yield pattern.restrict(keys)
            del alive, keys  # before the next are made

    return chunks


# Selection

FEW = 1 << 22
"""The most keys that are kept between passes; others are made again."""


class Threshold(NamedTuple):
    """Where the k largest keys end."""

    key: int
    """The k-th largest key."""
    kept: int
    """How many keys equal to it are among the k largest."""
    equal: int
    """How many keys equal to it there are."""


def kth_largest(sources: Sequence[KeyChunks], k: int, *, bits: int = 31, digit_bits: int = 16) -> Threshold:
    """Return the k-th largest key over all sources, for k >= 1.

    Args:
        bits: the number of bits of a key.
        digit_bits: the number of bits of a digit, of which all values are counted in one pass.
    """
    prefix, remaining, equal, shift = 0, k, 0, bits
    while shift > 0:
        width = min(shift, digit_bits)
        shift -= width
        counts = _count_digits(sources, prefix, shift, width, is_first=shift + width == bits)
        from_top = counts.flip(0).cumsum(0)
        place = int(torch.searchsorted(from_top, remaining))
        if place == counts.numel():
            break
        remaining -= int(from_top[place - 1]) if place else 0
        digit = counts.numel() - 1 - place
        prefix, equal = (prefix << width) | digit, int(counts[digit])
    if prefix == 0:
        raise GrowpruneError(f"cannot choose {k} positions: fewer are available")
    return Threshold(prefix, remaining, equal)


def choose(
    sources: Sequence[KeyChunks],
    k: int,
    *,
    bits: int = 31,
    device: torch.device | None = None,
    least: Sequence[int] = (),
) -> Iterator[Iterator[Tensor]]:
    """Yield, for each source, bool chunks that are True at the k largest keys. Consume them in order.

    Args:
        bits: the number of bits of a key.
        device: where the keys are; by default the CPU. It affects only the speed.
        least: how many keys of each source are chosen at least. A source that would get fewer gets its `least`
            largest, and the others share the rest.
    """
    sources = _kept_if_few(sources)
    # 2^16 counters need the fewest passes; on a GPU, no more than 2^11 fit into the memory that counts fastest
    digit_bits = 11 if device is not None and device.type == "cuda" else 16

    def threshold(among: Sequence[int], k: int) -> Threshold | None:
        return kth_largest([sources[i] for i in among], k, bits=bits, digit_bits=digit_bits) if k else None

    together: Sequence[int] = range(len(sources))
    shared = threshold(together, k)
    while any(least):
        walks = _walks([sources[i] for i in together], shared)
        found = in_one_go([torch.stack([torch.count_nonzero(chunk) for chunk in walk]).sum() for walk in walks])
        short = {i for i, count in zip(together, found, strict=True) if count < least[i]}
        if not short:
            break
        k, together = k - sum(least[i] for i in short), [i for i in together if i not in short]
        shared = threshold(together, k)
    others = _walks([sources[i] for i in together], shared)
    for i, source in enumerate(sources):
        yield next(others) if i in together else next(_walks([source], threshold([i], least[i])))


def _kept_if_few(sources: Sequence[KeyChunks]) -> list[KeyChunks]:
    """Keep up to FEW keys of the first pass for the next ones: to copy them is quicker than to make them again."""
    left = FEW

    def keeping(source: KeyChunks) -> KeyChunks:
        kept: list[Tensor] | None = None

        def chunks() -> Iterator[Tensor]:
            nonlocal kept, left
            if kept is not None:
                yield from map(torch.clone, kept)
                return
            made: list[Tensor] = []
            for chunk in source():
                left -= chunk.numel()
                if left >= 0:
                    made.append(chunk.clone())
                yield chunk
            kept = made if left >= 0 else None

        return chunks

    return [keeping(source) for source in sources]


def _walks(sources: Sequence[KeyChunks], threshold: Threshold | None) -> Iterator[Iterator[Tensor]]:
    """Yield, for each source, bool chunks that are True down to the threshold; nowhere if there is none."""
    key, left, equal = threshold or Threshold(1 << 63, 0, 0)
    takes_all = left == equal  # of the keys that equal the threshold; otherwise the first ones

    def chosen(keys: Tensor) -> Tensor:
        nonlocal left
        if threshold is None:
            return torch.zeros_like(keys, dtype=torch.bool)
        if takes_all or not left:
            return keys >= key if takes_all else keys > key
        places = keys >= key
        tied = (keys == key).nonzero(as_tuple=True)[0]
        places[tied[left:]] = False
        left -= min(len(tied), left)
        return places

    def walk(source: KeyChunks) -> Iterator[Tensor]:
        for keys in source():
            yield chosen(keys)
            del keys  # before the source makes the next

    return map(walk, sources)


def _count_digits(sources: Sequence[KeyChunks], prefix: int, shift: int, width: int, *, is_first: bool) -> Tensor:
    """How many keys that begin with `prefix` have each value of the next `width` bits."""
    size = 1 << width
    counts = torch.zeros(size, dtype=torch.int64)
    for source in sources:
        for keys in source():
            counts = counts.to(keys.device)
            digits = keys.bitwise_right_shift_(shift)
            if not is_first:  # the next digit where the key begins with the prefix, and an impossible one elsewhere
                digits -= prefix << width
            # histc does not wait for the device, as bincount does; but torch refuses it where only deterministic code
            # may run. What lies above goes into a bin of its own.
            if digits.is_cuda and not torch.are_deterministic_algorithms_enabled():
                counts += torch.histc(digits, bins=size + 1, min=0, max=size + 1)[:size]
            else:
                digits = digits if is_first else digits[(digits >= 0).logical_and_(digits < size)]
                counts += torch.bincount(digits, minlength=size)
            del keys, digits  # before the source makes the next
    return counts.cpu()
