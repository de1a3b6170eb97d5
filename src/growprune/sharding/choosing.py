"""Choose the live weights when each rank has only a shard of the values.

This is `masks.ranking`, distributed over the ranks: each counts the digits of its own keys, the counts are summed, and
all ranks know the threshold. Ties go to the earlier positions: each rank learns how many precede its own. Only the
choice, a byte for each candidate, is sent to all, one weight at a time. So masks are bit-identical on any number of
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.masks.allocation import Pool
from growprune.masks.layers import Weight
from growprune.masks.patterns import Pattern, chunk_elements, row_chunks
from growprune.masks.ranking import KeyChunks, Ties, key_bits_of, kth_largest, magnitude_keys
from growprune.plan import Action, By, Edit
from growprune.sharding.parameter import ShardedCompact
from growprune.sharding.ranks import Ranks
from growprune.sparse.editor import Chosen
from growprune.sparse.gradients import Gradients
from growprune.storage import SparseParameter

Masks = Callable[[Weight], Tensor]
"""Returns the mask of a weight."""


class Candidates(NamedTuple):
    """The elements of one weight that an edit may choose, in order."""

    scores: Tensor
    """The scores of this rank's candidates."""
    alive: Tensor | None
    """Which of them are live, if needed."""
    spans: list[tuple[int, int]]
    """The (start, end) of each rank's candidates."""


class Choosing:
    """Prune by magnitude and grow by gradient without gathering, for patterns of single weights."""

    def __init__(
        self, ranks: Ranks, parameters: Mapping[str, SparseParameter], gradients: Gradients, pattern: Pattern
    ) -> None:
        self._ranks, self._parameters, self._gradients, self._pattern = ranks, parameters, gradients, pattern

    def can_choose(self, weights: Sequence[Weight], edit: Edit) -> bool:
        """True if each rank needs only its shard of the values."""
        is_known = (edit.action, edit.by) in ((Action.PRUNE, By.MAGNITUDE), (Action.GROW, By.GRADIENT))
        stored = [self._parameters[weight.parameter] for weight in weights]
        return is_known and self._pattern.is_single and all(isinstance(s, ShardedCompact) for s in stored)

    def chosen(self, pool: Pool, edit: Edit, mask: Masks) -> Chosen:
        """Yield which groups of a pool are live, the same on all ranks."""
        dtypes = {self._parameters[w.parameter].parameter.dtype for w in pool.weights}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        bits = key_bits_of(edit, dtype)
        self._check_finite(pool.weights, edit, mask)
        sources = [self._keys(weight, edit, mask, dtype, bits) for weight in pool.weights]
        key, left = None, [0] * len(sources)
        if pool.kept:
            key, kept, _ = kth_largest(sources, pool.kept, bits=bits, digit_bits=11, add_up=self._ranks.add_up)
            left = self._ties_left(sources, key, kept)
        for weight, source, own in zip(pool.weights, sources, left, strict=True):
            yield weight, self._walk(weight, edit, mask, source, key, own)

    def _walk(
        self, weight: Weight, edit: Edit, mask: Masks, source: KeyChunks, key: int | None, left: int
    ) -> Iterator[Tensor]:
        """Yield which of a weight's elements are live, a few rows at a time, from the choices of all ranks."""
        ties = Ties(left)
        own = [torch.zeros_like(keys, dtype=torch.bool) if key is None else ties.take(keys, key) for keys in source()]
        part = torch.cat(own) if own else torch.zeros(0, dtype=torch.bool, device=mask(weight).device)
        chosen = self._ranks.join(part.to(torch.uint8), self._candidates(weight, edit, mask).spans).bool()
        if edit.action is Action.PRUNE:
            flat = mask(weight).reshape(-1).clone()
            flat[flat.clone()] = chosen
            chosen = flat
        start = 0
        for rows in row_chunks(self._pattern, mask(weight), weight):
            yield chosen[start : start + rows.numel()]
            start += rows.numel()

    def _candidates(self, weight: Weight, edit: Edit, mask: Masks) -> Candidates:
        """Return this rank's candidates: its shard of live values, or its part of gradients."""
        parameter = self._parameters[weight.parameter]
        assert isinstance(parameter, ShardedCompact)
        first = (weight.rows[0] if weight.rows else 0) * parameter.shape[1:].numel()
        if edit.action is Action.GROW:
            share, spans = self._gradients.share(weight.parameter), self._ranks.spans(parameter.shape.numel())
            wanted = first, first + weight.numel
        else:
            values = parameter.parameter.detach()
            rest, before = values.shape[1:].numel(), self._live_before(parameter, first)
            share = values.to_local().reshape(-1)  # type: ignore[attr-defined]
            spans = [(start * rest, stop * rest) for start, stop in self._ranks.spans(values.shape[0])]
            wanted = before, before + int(torch.count_nonzero(mask(weight)))
        cuts = [_overlap(span, wanted) for span in spans]
        (start, stop), at = cuts[self._ranks.rank], spans[self._ranks.rank][0]
        alive = mask(weight).reshape(-1)[start - first : stop - first] if edit.action is Action.GROW else None
        return Candidates(share[start - at : stop - at], alive, cuts)

    def _live_before(self, parameter: ShardedCompact, position: int) -> int:
        """Return how many live values come before a position of the dense parameter."""
        if parameter.is_known_full or position == 0:
            return position
        return int(torch.count_nonzero(parameter.mask().reshape(-1)[:position]))

    def _keys(self, weight: Weight, edit: Edit, mask: Masks, dtype: torch.dtype, bits: int) -> KeyChunks:
        always = (1 << bits) - 1  # live weights stay

        def chunks() -> Iterator[Tensor]:
            scores, alive, _ = self._candidates(weight, edit, mask)
            step = chunk_elements(scores.device)
            for start in range(0, scores.numel(), step):
                some = scores[start : start + step]
                keys = magnitude_keys(some.double() if dtype == torch.float64 else some)
                yield keys if alive is None else torch.where(alive[start : start + step], always, keys)
                del keys

        return chunks

    def _ties_left(self, sources: Sequence[KeyChunks], key: int, kept: int) -> list[int]:
        """Return how many keys equal to the threshold this rank may choose from each source."""
        mine = [sum(int(torch.count_nonzero(keys == key)) for keys in source()) for source in sources]
        ties = self._ranks.each(torch.tensor(mine, device=self._ranks.device)).tolist()
        left = []
        for number, own in enumerate(mine):
            before = sum(sum(row[:number]) for row in ties) + sum(row[number] for row in ties[: self._ranks.rank])
            left.append(max(0, min(own, kept - before)))
        return left

    def _check_finite(self, weights: Sequence[Weight], edit: Edit, mask: Masks) -> None:
        """Raise on all ranks if one has a NaN or infinity."""
        flags = []
        for weight in weights:
            scores = self._candidates(weight, edit, mask).scores
            flags.append(torch.isfinite(scores).all().logical_not().to(self._ranks.device, torch.int64))
        for weight, count in zip(weights, self._ranks.add_up(torch.stack(flags)).tolist(), strict=True):
            if count:
                raise GrowpruneError(
                    f"{weight.name} has NaN or infinity, so it cannot be pruned by rank: training diverged"
                )


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    start = max(one[0], min(one[1], other[0]))
    return start, max(start, min(one[1], other[1]))
