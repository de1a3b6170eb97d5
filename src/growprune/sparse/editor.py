"""Apply edits to the masks: how many groups of each weight are live afterwards, and which ones.

A group is what is live or dead as a whole: a weight, or a block of weights. The weights of a pool are ranked together,
and the best groups are live. The dense tensors of at most one parameter are in memory at a time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from growprune.errors import GrowpruneError, warn
from growprune.masks.allocation import FLOOR, RANKINGS, Pool, erk, parse_allocation, shared_out, uniform
from growprune.masks.inspection import masks_of_zeros
from growprune.masks.layers import Weight, few
from growprune.masks.patterns import Pattern, count_groups, in_one_go, write_groups
from growprune.masks.ranking import check_finite, choose, edit_keys, key_bits_of, salt_of
from growprune.plan import Action, By, Edit, Part, Spread
from growprune.sparse.gradients import Gradients
from growprune.storage import SparseParameter

if TYPE_CHECKING:
    from growprune.sparse.model import SparseModel


class Editor:
    """Change masks, and the state of optimizers with them."""

    def __init__(self, sparse: SparseModel, *, rescale: bool, cost_factors: Mapping[str, float]) -> None:
        self._sparse, self._stored, self._gradients = sparse, sparse.stored, sparse.gradients
        self.weights, self._pattern, self._seed = sparse.weights, sparse.pattern, sparse.seed
        self._allocate = parse_allocation(sparse.allocation)
        self.rescales = rescale
        """True if a random mask, which only untrained weights get, keeps activations as large as they were."""
        self.cost_factors = cost_factors
        """By weight name, what scales its scores in a prune by one ranking of several layers; empty for 1 each."""
        self.num_edits = 0
        """The number of edits so far, so that each random edit draws different numbers."""
        self.lost: dict[str, int] = {}
        """By weight name: how many groups the previous edit pruned."""
        self._warned_of: set[str] = set()

    # How many groups are live

    def weights_of(self, part: Part) -> tuple[Weight, ...]:
        names = set(part.tensors)
        return tuple([w for w in self.weights if w.parameter in names])

    def num_alive(self, weights: Sequence[Weight], *, pattern: Pattern | None = None) -> dict[str, int]:
        """Return the number of live groups of each weight, by name. Waits for the device once.

        Args:
            pattern: the pattern of the groups; by default that of the masks.
        """
        pattern = self._pattern if pattern is None else pattern
        alive, counted, name, mask = {}, {}, "", None
        for weight in weights:
            stored = self._stored[weight.parameter]
            alive[weight.name] = pattern.num_groups(weight)
            if stored.is_known_full:
                continue
            if weight.parameter != name:
                mask = None  # before the next is made
                name, mask = weight.parameter, stored.mask()
            counted[weight.name] = count_groups(pattern, weight.of(mask), weight)
        return alive | dict(zip(counted, in_one_go(list(counted.values())), strict=True))

    def pools(self, edit: Edit, alive: Mapping[str, int] | None = None, *, is_estimate: bool = False) -> list[Pool]:
        """Return the pools of an edit: weights that are ranked together, and how many groups it leaves live.

        Args:
            alive: the number of live groups of each weight before the edit, by name; by default counted where needed.
            is_estimate: treat growth that is spread by momentum, or by what layers lost, as spread by live groups. No
                gradient is needed then.
        """
        part, is_ranked = self.weights_of(edit.part), self._allocate in RANKINGS
        if not part:
            return []
        if alive is None and (edit.within is not None or edit.share is not None or edit.spread is not None):
            alive = self.num_alive(self.weights if edit.within is not None else part)
        # under other allocations than a global ranking, layers have fixed counts
        spread = edit.spread if is_ranked or edit.spread not in (Spread.LOST, Spread.ERK) else None
        if edit.within is not None:  # all of the part, or as much of it as fits
            assert alive is not None
            total = sum(map(self._pattern.num_groups, self.weights))
            # where each layer rounds for itself, half a group of each may live too much, and the part is still to fit
            rounded = Fraction(len(self.weights), 2) if self._allocate is uniform else 0
            room = int(Fraction(str(edit.within)) * total + rounded) - sum(alive[w.name] for w in self.weights)
            now, most = sum(alive[w.name] for w in part), sum(map(self._pattern.most_alive, part))
            whole = sum(map(self._pattern.num_groups, part))
            return [Pool(part, whole if now + room >= whole else max(now, min(now + room, most)))]
        if spread in (Spread.LIVE, Spread.MOMENTUM, Spread.LOST):  # the total is that of the allocation
            assert alive is not None
            total = sum(pool.kept for pool in self.pools(replace(edit, spread=None), alive))
            counts = [alive[w.name] for w in part]
            capacity = [self._pattern.most_alive(w) - count for w, count in zip(part, counts, strict=True)]
            if not sum(counts) <= total <= sum(counts) + sum(capacity):
                return [Pool(part, total)]  # which cannot be done, and the check of it says so
            among: Sequence[float] = counts
            if spread is not Spread.LIVE and not is_estimate:
                is_lost = spread is Spread.LOST
                among = [self.lost.get(w.name, 0) for w in part] if is_lost else self._mean_momenta(part)
            more = shared_out(total - sum(counts), among, capacity)
            return [Pool((w,), count + some) for w, count, some in zip(part, counts, more, strict=True)]
        if edit.share is not None:
            assert alive is not None
            pools = [Pool(part, 0)] if spread is Spread.RANKING else [Pool((w,), 0) for w in part]
            sign, share = -1 if edit.action is Action.PRUNE else 1, Fraction(str(edit.share))
            totals = [total_of(pool, alive) for pool in pools]
            return [replace(p, kept=total + sign * int(share * total)) for p, total in zip(pools, totals, strict=True)]
        assert edit.to is not None
        try:
            for weight in part:
                self._pattern.check(weight, edit.to)
        except GrowpruneError as error:
            remedy = "If the method's sparsity rises, raise `start` or lower `peak_density`"
            raise GrowpruneError(f"{error}. {remedy}") from error
        ranked = part if is_ranked and edit.action is Action.GROW else self.weights  # growth leaves other parts alone
        return (erk if spread is Spread.ERK else self._allocate)(ranked, part, edit.to, self._pattern)

    def _mean_momenta(self, part: Sequence[Weight]) -> list[float]:
        """Return the mean |momentum| of each weight's live elements."""
        means = []
        for name, weights in groupby(part, key=lambda weight: weight.parameter):
            momentum, mask = self._gradients.scores(By.MOMENTUM, name), self._stored[name].mask()
            for weight in weights:
                own, alive = weight.of(momentum), weight.of(mask)
                check_finite(own, weight)
                means.append(own[alive].abs().sum(dtype=torch.float64) / alive.sum().clamp(min=1))
        return [float(mean) for mean in torch.stack(means).tolist()]

    def changed(self, pools: Sequence[Pool], edit: Edit, alive: Mapping[str, int]) -> list[Pool]:
        """Return the pools that an edit changes. Raise if the edit is impossible."""
        counts = [total_of(pool, alive) for pool in pools]
        pools = within_one(pools, counts, edit.action)
        if edit.action is Action.PRUNE:  # no layer grows to its floor
            floors = [map(min, pool.least, [alive[w.name] for w in pool.weights]) for pool in pools]
            pools = [replace(pool, least=tuple(floor)) for pool, floor in zip(pools, floors, strict=True)]
        for pool, now in zip(pools, counts, strict=True):
            most = sum(map(self._pattern.most_alive, pool.weights))
            if _is_wrong_way(edit, pool, now):
                raise GrowpruneError(
                    f"cannot {edit.action.value} {few(pool.weights)} to sparsity {edit.to}: that needs {pool.kept} "
                    f"live weights, but {now} are live; {'grow' if edit.action is Action.PRUNE else 'prune'} first"
                )
            if pool.kept > most:
                raise GrowpruneError(
                    f"cannot {edit}: that needs {pool.kept} live weights in {few(pool.weights)}, but the pattern "
                    f"allows at most {most}"
                )
        return [pool for pool, now in zip(pools, counts, strict=True) if pool.kept != now]

    def is_possible(self, edit: Edit) -> bool:
        """True if an edit can reach its count."""
        alive = self.num_alive(self.weights)
        pools = self.pools(edit, alive)
        counts = [total_of(pool, alive) for pool in pools]
        pairs = zip(within_one(pools, counts, edit.action), counts, strict=True)
        return not any(_is_wrong_way(edit, pool, now) for pool, now in pairs)

    def is_done(self, edit: Edit) -> bool:
        """True if the total of live weights is already what the edit leaves, however layers share it."""
        alive = self.num_alive(self.weights)
        pools = self.pools(edit, alive)
        return sum(pool.kept for pool in pools) == sum(total_of(pool, alive) for pool in pools)

    # Edits

    def apply(self, edit: Edit) -> None:
        if edit.by is By.AS_IS:
            self._apply_as_is(edit)
        elif edit.to == 0 and edit.within is None:
            self._grow_all(edit)
        else:
            is_of_all = edit.within is not None or (self._allocate in RANKINGS and edit.action is Action.PRUNE)
            alive = self.num_alive(self.weights if is_of_all else self.weights_of(edit.part))
            pools = self.pools(edit, alive)
            is_all = edit.to == 0 and all(p.kept == sum(map(self._pattern.num_groups, p.weights)) for p in pools)
            self._grow_all(edit) if is_all else self.select(pools, edit, alive)
        self.num_edits += 1

    def _grow_all(self, edit: Edit) -> None:
        """Make all weights of a part live. A prune to dense changes nothing."""
        self.lost = {}
        weights = self.weights_of(edit.part) if edit.action is Action.GROW else ()
        if edit.action is Action.GROW and not weights:
            what = "all its weights are kept dense; pass the same keep_dense to Partition"
            warn(f"{edit.part.name} has nothing to grow: {what}")
        for name in dict.fromkeys(weight.parameter for weight in weights):
            stored = self._stored[name]
            self.set_mask(name, torch.ones(stored.shape, dtype=torch.bool, device=stored.parameter.device))

    def _apply_as_is(self, edit: Edit) -> None:
        """Keep the zeros of the model. Raise unless each pool has as many live groups as the edit leaves.

        One group of rounding is allowed. Each pool is checked, not only the total, because later edits need the same of
        it.
        """
        # if all are live, the model was pruned earlier, or by another tool; optimizers are attached by now, and follow
        if self._gradients.shares is None and all(bool(stored.mask().all()) for stored in self._stored.values()):
            masks = masks_of_zeros(lambda name: self._stored[name].weight(), self.weights, self._pattern)
            for name, mask in masks.items():
                self.set_mask(name, mask)
        self.lost = {}
        alive = self.num_alive(self.weights_of(edit.part))
        pools = self.pools(edit, alive)
        counts = [total_of(pool, alive) for pool in pools]
        is_in_all = sum(counts) == sum(pool.kept for pool in pools)
        for pool, count in zip(pools, counts, strict=True):
            if abs(pool.kept - count) > (1 if is_in_all else 0):
                remedy = "use initial_mask='magnitude'" if count > pool.kept else "start the plan at a higher sparsity"
                remedy = "use allocation='global', which counts all layers together" if is_in_all else remedy
                raise GrowpruneError(
                    f"initial_mask='as_is' does not fit: {few(pool.weights)} has {count} live weights, but the plan "
                    f"starts with {pool.kept} (sparsity {edit.to:.4g}); {remedy}"
                )

    def select(self, pools: Sequence[Pool], edit: Edit, alive: Mapping[str, int] | None = None) -> None:
        """Apply an edit to some of its pools. If one of them is impossible, nothing changes.

        Args:
            alive: the number of live groups of each weight, by name; by default counted.
        """
        alive = self.num_alive([w for pool in pools for w in pool.weights]) if alive is None else alive
        pools = self.changed(pools, edit, alive)
        weights = [weight for pool in pools for weight in pool.weights]
        reader = Reader(self._stored, self._gradients, edit)
        for weight in weights if edit.by is not By.RANDOM else ():
            check_finite(weight.of(reader.values(weight)), weight)
        left = self._choose(pools, edit, reader, self.set_mask)
        self.lost = {weight.name: alive[weight.name] - left[weight.name] for weight in weights}
        if self.rescales and edit.by is By.RANDOM and edit.action is Action.PRUNE:
            # a unit that sums fewer inputs is to give numbers as large: without normalization, signals would fade from
            # layer to layer, and training might not begin
            before, after = Counter[str](), Counter[str]()
            for weight in weights:
                before[weight.parameter] += alive[weight.name]
                after[weight.parameter] += left[weight.name]
            with torch.no_grad():
                for name in before:
                    self._stored[name].parameter.mul_(math.sqrt(before[name] / max(1, after[name])))
        floors = [(w, least) for pool in pools for w, least in zip(pool.weights, pool.least, strict=False)]
        if new := [w for w, least in floors if 0 < left[w.name] == least and w.name not in self._warned_of]:
            self._warned_of |= {weight.name for weight in new}
            warn(
                f"allocation='global' prunes {few(new)} to its floor, {float(FLOOR):.0%} of the weights that "
                f"'uniform' leaves there, because other layers have larger weights (as with higher learning rates): "
                f"use allocation='erk' or 'uniform', or the same learning rate for all layers"
            )
        self.warn_of_dead([weight for weight in weights if not left[weight.name]], pools)

    def warn_of_dead(self, dead: Sequence[Weight], pools: Sequence[Pool]) -> None:
        """Warn once about each layer that has no live weight left."""
        if not (new := [weight for weight in dead if weight.name not in self._warned_of]):
            return
        self._warned_of |= {weight.name for weight in new}
        layers, it = (f"layer {few(new)} was", "it") if len(new) == 1 else (f"layers {few(new)} were", "them")
        is_ranking = any(len(pool.weights) > 1 and not set(pool.weights).isdisjoint(new) for pool in pools)
        small = "" if is_ranking else f", too small for this sparsity; add {it} to keep_dense"
        warn(f"{layers} pruned to zero weights" + (small or f"; add {it} to keep_dense or use allocation='uniform'"))

    def _choose(
        self, pools: Sequence[Pool], edit: Edit, reader: Reader, set_mask: Callable[[str, Tensor], object]
    ) -> dict[str, int]:
        """Set the masks so that the best groups of each pool are live. Return the live groups by weight.

        Args:
            set_mask: takes the name of a parameter, and its new mask.
        """
        name, mask, left, counted = "", None, {}, {}
        for pool in pools:
            for weight, chosen in self._chosen(pool, edit, reader.read):
                if mask is None or weight.parameter != name:
                    if mask is not None:
                        set_mask(name, mask)
                    mask = None  # before the next is made
                    name, mask = weight.parameter, reader.whole_mask(weight).clone()
                own = weight.of(mask)
                write_groups(self._pattern, own, weight, chosen)
                left[weight.name] = pool.kept
                if len(pool.weights) > 1:
                    counted[weight.name] = count_groups(self._pattern, own, weight)
        if mask is not None:
            set_mask(name, mask)
        return left | dict(zip(counted, in_one_go(list(counted.values())), strict=True))

    def _chosen(
        self, pool: Pool, edit: Edit, read: Callable[[Weight], tuple[Tensor, Tensor]]
    ) -> Iterator[tuple[Weight, Iterator[Tensor]]]:
        """Yield each weight with which of its groups are among the best `pool.kept` of the pool, a few rows at a time.

        Args:
            read: returns the values that a weight is ranked by, and its mask.
        """
        parameters = [self._stored[weight.parameter].parameter for weight in pool.weights]
        is_wide = torch.float64 in [parameter.dtype for parameter in parameters]
        dtype = torch.float64 if is_wide else torch.float32
        is_by_cost = edit.action is Action.PRUNE and len(pool.weights) > 1
        sources = [
            edit_keys(
                edit,
                weight,
                self._pattern,
                read=read,
                salt=salt_of(self._seed, self.num_edits, weight.name),
                dtype=dtype,
                factor=self.cost_factors.get(weight.name, 1.0) if is_by_cost else 1.0,
            )
            for weight in pool.weights
        ]
        least = pool.least if edit.action is Action.PRUNE else ()
        walks = choose(sources, pool.kept, bits=key_bits_of(edit, dtype), device=parameters[0].device, least=least)
        return zip(pool.weights, walks, strict=True)

    def set_mask(self, name: str, mask: Tensor) -> None:
        """Set the mask of a parameter. New live weights start at zero, and so does their optimizer state."""
        with self._sparse.following(name) as stored:
            stored.set_mask(mask)

    # What an edit would do

    def preview(self, edit: Edit) -> Callable[[], None]:
        """Prune without touching optimizers, and return a function that undoes it. On failure, nothing changes."""
        alive = self.num_alive(self.weights)
        pools = self.changed(self.pools(edit, alive), edit, alive)
        with ExitStack() as undo:
            reader = Reader(self._stored, self._gradients, edit)
            self._choose(pools, edit, reader, lambda name, mask: undo.callback(self._stored[name].preview(mask)))
            return undo.pop_all().close

    def kept(self, edit: Edit, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return which of these values an edit would keep if all were live now, by parameter. No mask changes."""
        pools = self.pools(edit)
        ranked = {w.parameter: self._stored[w.parameter].weight() for pool in pools for w in pool.weights}
        ranked |= values  # a ranking of the whole model has other weights too
        masks = {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in ranked.items()}

        def read(weight: Weight) -> tuple[Tensor, Tensor]:
            own = weight.of(ranked[weight.parameter])
            return own, torch.ones_like(own, dtype=torch.bool)

        for pool in pools:
            for weight, chosen in self._chosen(pool, edit, read):
                write_groups(self._pattern, weight.of(masks[weight.parameter]), weight, chosen)
        return {name: masks[name] for name in values}


class Reader:
    """Read dense masks and the values that an edit ranks by, one parameter at a time."""

    def __init__(self, stored: Mapping[str, SparseParameter], gradients: Gradients, edit: Edit) -> None:
        self._stored, self._gradients, self._edit = stored, gradients, edit
        self._name = ""
        self._mask: Tensor | None = None
        self._values: Tensor | None = None
        self._scores: dict[str, Tensor] = {}
        """By parameter: those of the user's own criterion, which is called once for each."""

    def _turn_to(self, name: str) -> None:
        if name != self._name:
            self._name, self._mask, self._values = name, None, None  # before the next are made

    def whole_mask(self, weight: Weight) -> Tensor:
        """Return the mask of the parameter that a weight belongs to."""
        self._turn_to(weight.parameter)
        if self._mask is None:
            self._mask = self._stored[weight.parameter].mask()
        return self._mask

    def values(self, weight: Weight) -> Tensor:
        """Return the values that the parameter which a weight belongs to is ranked by."""
        self._turn_to(name := weight.parameter)
        if self._edit.score is not None:
            if name not in self._scores:
                self._scores[name] = self._scored(name)
            return self._scores[name]
        if self._values is None:
            is_size, by = self._edit.by is By.MAGNITUDE, self._edit.by
            self._values = self._stored[name].weight() if is_size else self._gradients.scores(by, name)
        return self._values

    def _scored(self, name: str) -> Tensor:
        values = [self._stored[name].weight().clone()]  # which the function may change in place
        if self._edit.by is By.GRADIENT:
            values.append(self._gradients.scores(By.GRADIENT, name).clone())
        assert self._edit.score is not None
        with torch.no_grad():
            found: object = self._edit.score(*values)
        shape = tuple(self._stored[name].shape)
        if not isinstance(found, Tensor):
            what = f"a {type(found).__name__}"
        elif found.shape != shape or not found.is_floating_point():
            what = f"one of shape {tuple(found.shape)} and {found.dtype}"
        elif not bool(found.isfinite().all()):
            what = "one with NaN or infinity"
        else:
            return found.detach().to(values[0].device)
        raise GrowpruneError(
            f"{self._edit.criterion} must return a finite floating-point tensor of shape {shape} for {name}, got {what}"
        )

    def read(self, weight: Weight) -> tuple[Tensor, Tensor]:
        """Return the values and the mask of a weight. A random edit needs no values."""
        mask = self.whole_mask(weight)
        values = mask if self._edit.by is By.RANDOM else self.values(weight)
        return weight.of(values), weight.of(mask)


def total_of(pool: Pool, alive: Mapping[str, int]) -> int:
    return sum([alive[weight.name] for weight in pool.weights])


def within_one(pools: Sequence[Pool], counts: Sequence[int], action: Action) -> list[Pool]:
    """Adjust pools by one group where rounding would reverse the direction of an edit, and keep the total.

    ERK's counts add up to an exact total, so with a rising sparsity the rounded count of a layer may rise by one.
    Another layer then gives up one group instead. The same applies in reverse when layers grow.
    """
    sign = 1 if action is Action.PRUNE else -1
    kept = [pool.kept - sign * (pool.kept == count + sign) for pool, count in zip(pools, counts, strict=True)]
    lacking = sign * (sum(pool.kept for pool in pools) - sum(kept))
    for i, count in enumerate(counts):
        more = min(lacking, max(0, sign * (count - kept[i])))
        kept[i], lacking = kept[i] + sign * more, lacking - more
    return [replace(pool, kept=k) for pool, k in zip(pools, kept, strict=True)] if not lacking else list(pools)


def _is_wrong_way(edit: Edit, pool: Pool, alive: int) -> bool:
    """True if an edit would have to prune in order to grow, or to grow in order to prune."""
    return pool.kept != alive and (pool.kept > alive) is (edit.action is Action.PRUNE)
