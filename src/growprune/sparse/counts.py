"""Count live weights, and how many an edit leaves live in each layer. editor.py applies the edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import groupby

import torch

from growprune.errors import GrowpruneError
from growprune.masks.allocation import Pool, erk, global_, parse_allocation, shared_out, uniform
from growprune.masks.layers import Weight
from growprune.masks.patterns import Pattern, count_groups, in_one_go
from growprune.masks.ranking import check_finite
from growprune.plan import Action, By, Edit, Part, Spread
from growprune.sparse.gradients import Gradients
from growprune.storage import SparseParameter


class Counts:
    """The result of an edit as numbers of groups: weights, or blocks of weights."""

    def __init__(
        self,
        weights: Sequence[Weight],
        stored: Mapping[str, SparseParameter],
        gradients: Gradients,
        *,
        pattern: Pattern,
        allocation: str,
    ) -> None:
        self.weights, self.stored, self.gradients = tuple(weights), stored, gradients
        self.pattern, self._allocate = pattern, parse_allocation(allocation)
        self.lost: dict[str, int] = {}
        """By weight name: how many groups the previous edit pruned."""

    def weights_of(self, part: Part) -> tuple[Weight, ...]:
        names = set(part.tensors)
        return tuple(w for w in self.weights if w.parameter in names)

    def concerned(self, edit: Edit) -> tuple[Weight, ...]:
        """Return the weights that an edit may have to count: its part, or the whole model."""
        is_ranked = self._allocate is global_ and edit.action is Action.PRUNE
        return self.weights if is_ranked or edit.within is not None else self.weights_of(edit.part)

    def num_alive(self, weights: Sequence[Weight], *, pattern: Pattern | None = None) -> dict[str, int]:
        """Return the number of live groups of each weight, by name. Waits for the device once.

        Args:
            pattern: the pattern of the groups; by default that of the masks.
        """
        pattern = self.pattern if pattern is None else pattern
        alive, counted, name, mask = {}, [], "", None
        for weight in weights:
            stored = self.stored[weight.parameter]
            if stored.is_known_full:
                alive[weight.name] = pattern.num_groups(weight)
                continue
            if weight.parameter != name:
                mask = None  # before the next is made
                name, mask = weight.parameter, stored.mask()
            alive[weight.name] = 0
            counted.append((weight.name, count_groups(pattern, weight.of(mask), weight)))
        numbers = in_one_go([count for _, count in counted])
        return alive | {name: number for (name, _), number in zip(counted, numbers, strict=True)}

    def pools(self, edit: Edit, alive: Mapping[str, int] | None = None, *, is_estimate: bool = False) -> list[Pool]:
        """Return the pools of an edit: weights that are ranked together, and how many groups it leaves live.

        Args:
            alive: the number of live groups of each weight before the edit, by name; by default counted where needed.
            is_estimate: treat growth that is spread by momentum, or by what layers lost, as spread by live groups. No
                gradient is needed then.
        """
        part, spread = self.weights_of(edit.part), self._spread_of(edit)
        if edit.within is not None and part:
            return [self._fitting(edit.within, part, alive)]
        if spread in (Spread.LIVE, Spread.MOMENTUM, Spread.LOST) and part:
            return self._spread_out(edit, part, alive, is_estimate=is_estimate)
        if edit.to is None:
            alive = self.num_alive(part) if alive is None else alive
            if spread is Spread.RANKING:
                return [Pool(part, _shared(edit, sum(alive[w.name] for w in part)))] if part else []
            return [Pool((w,), _shared(edit, alive[w.name])) for w in part]
        self._check_pattern(part, edit.to)
        ranked = self.weights if edit.action is Action.PRUNE or self._allocate is not global_ else part
        allocate = erk if spread is Spread.ERK else self._allocate
        return allocate(ranked, part, edit.to, self.pattern) if part else []

    def _check_pattern(self, part: Sequence[Weight], to: float) -> None:
        try:
            for weight in part:
                self.pattern.check(weight, to)
        except GrowpruneError as error:
            remedy = "If the method's sparsity rises, raise `start` or lower `peak_density`"
            raise GrowpruneError(f"{error}. {remedy}") from error

    def _spread_of(self, edit: Edit) -> Spread | None:
        """Return how layers share an edit. Some spreads need one global ranking, where layers have no fixed count."""
        is_ranked = self._allocate is global_
        return edit.spread if is_ranked or edit.spread not in (Spread.LOST, Spread.ERK) else None

    def _fitting(self, within: float, part: tuple[Weight, ...], alive: Mapping[str, int] | None) -> Pool:
        """Return all of a part, or as much of it as fits within the live groups that the model may have."""
        alive = self.num_alive(self.weights) if alive is None else alive
        num_groups = sum(map(self.pattern.num_groups, self.weights))
        # where each layer rounds for itself, half a group of each may live too much, and the part is still to fit
        rounded = Fraction(len(self.weights), 2) if self._allocate is uniform else 0
        capacity = int(Fraction(str(within)) * num_groups + rounded) - sum(
            alive[weight.name] for weight in self.weights
        )
        now, most = sum(alive[weight.name] for weight in part), sum(map(self.pattern.most_alive, part))
        whole = sum(map(self.pattern.num_groups, part))
        return Pool(part, whole if now + capacity >= whole else max(now, min(now + capacity, most)))

    def _spread_out(
        self, edit: Edit, part: tuple[Weight, ...], alive: Mapping[str, int] | None, *, is_estimate: bool
    ) -> list[Pool]:
        """Return pools of one weight each that divide the total growth."""
        among = None if is_estimate else self._among(edit, part)
        alive = self.num_alive(part) if alive is None else alive
        now = [alive[weight.name] for weight in part]
        total = sum(pool.kept for pool in self.pools(replace(edit, spread=None), alive))
        capacity = [self.pattern.most_alive(weight) - count for weight, count in zip(part, now, strict=True)]
        if not sum(now) <= total <= sum(now) + sum(capacity):
            return [Pool(part, total)]  # which cannot be done, and the check of it says so
        more = shared_out(total - sum(now), now if among is None else among, capacity)
        return [Pool((w,), count + some) for w, count, some in zip(part, now, more, strict=True)]

    def _among(self, edit: Edit, part: Sequence[Weight]) -> Sequence[float] | None:
        """Return the proportions in which weights grow; None for proportional to live groups."""
        if edit.spread is Spread.MOMENTUM:
            return self._momenta(part)
        return [self.lost.get(weight.name, 0) for weight in part] if edit.spread is Spread.LOST else None

    def _momenta(self, part: Sequence[Weight]) -> list[float]:
        """Return the mean |momentum| of each weight's live elements."""
        means = []
        for name, weights in groupby(part, key=lambda weight: weight.parameter):
            momentum, mask = self.gradients.scores(By.MOMENTUM, name), self.stored[name].mask()
            for weight in weights:
                own, alive = weight.of(momentum), weight.of(mask)
                check_finite(own, weight)
                means.append(own[alive].abs().sum(dtype=torch.float64) / alive.sum().clamp(min=1))
        return [float(mean) for mean in torch.stack(means).tolist()]


def _shared(edit: Edit, alive: int) -> int:
    """Return how many are live after an edit by a share, rounded down, in exact arithmetic."""
    change = int(Fraction(str(edit.share)) * alive)
    return alive - change if edit.action is Action.PRUNE else alive + change


def total_of(pool: Pool, alive: Mapping[str, int]) -> int:
    return sum(alive[weight.name] for weight in pool.weights)


def within_one(pools: Sequence[Pool], alive: Mapping[str, int], action: Action) -> list[Pool]:
    """Adjust pools by one group where rounding would reverse the direction of an edit, and keep the total.

    ERK's counts add up to an exact total, so with a rising sparsity the rounded count of a layer may rise by one.
    Another layer then gives up one group instead. The same applies in reverse when layers grow.
    """
    sign = 1 if action is Action.PRUNE else -1
    counts = [total_of(pool, alive) for pool in pools]
    kept = [pool.kept - sign * (pool.kept == count + sign) for pool, count in zip(pools, counts, strict=True)]
    lacking = sign * (sum(pool.kept for pool in pools) - sum(kept))
    for i, count in enumerate(counts):
        more = min(lacking, max(0, sign * (count - kept[i])))
        kept[i], lacking = kept[i] + sign * more, lacking - more
    return [replace(pool, kept=k) for pool, k in zip(pools, kept, strict=True)] if not lacking else list(pools)
