"""Carrying out an edit: how many groups of which weights live after it; choosing.py says which they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from growprune.allocation import Pool, Scope, erk, global_, parse_allocation, shared_out, uniform
from growprune.choosing import Choosing, Chosen, OneByOne, SetMask, Together, Values, Written
from growprune.errors import GrowpruneError
from growprune.gradients import Gradients, Keep
from growprune.layers import Weight
from growprune.optimizers import Optimizers
from growprune.patterns import Pattern, count_groups, in_one_go, write_groups
from growprune.plan import Action, By, Edit, Part, Spread
from growprune.scores import check_finite
from growprune.storage import SparseParameter
from growprune.warn import warn


class Editor:
    """Changes masks, and takes the state of optimizers along.

    Args:
        weights: all that may be pruned.
        parameters: how their parameters are stored, by name.
        optimizers: those that train them.
        gradients: what edits that look at gradients go by.
        seed: decides every random choice, with the number of the edit.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        parameters: Mapping[str, SparseParameter],
        optimizers: Optimizers,
        gradients: Gradients,
        *,
        pattern: Pattern,
        allocation: str,
        scope: Scope,
        seed: int,
    ) -> None:
        self.weights, self._parameters, self._optimizers = tuple(weights), parameters, optimizers
        self._gradients = gradients
        self._choosing = Choosing(parameters, gradients, pattern, seed)
        self._pattern, self._allocate, self._scope = pattern, parse_allocation(allocation), scope
        self.num_edits = 0
        """How many edits there were, which makes each random one draw its own numbers."""
        self._lost: dict[str, int] = {}
        """By the name of a weight, how many groups the edit before took of it."""
        self.together: Together | None = None
        """If the weights are sharded: what chooses without gathering them."""

    def weights_of(self, part: Part) -> tuple[Weight, ...]:
        names = set(part.tensors)
        return tuple(w for w in self.weights if w.parameter in names)

    def pools(self, edit: Edit, alive: Mapping[str, int] | None = None) -> list[Pool]:
        """How many groups an edit leaves alive, of which weights ranked together.

        Args:
            alive: how many groups of each weight live before it, by name; counted if not given. If it is given, no
                gradient is looked at: what is spread by momentum, or by what was lost, is taken to go with the live
                weights.
        """
        part, spread = self.weights_of(edit.part), self._spread_of(edit)
        if edit.within is not None and part:
            return [self._fitting(edit.within, part, alive)]
        if spread in (Spread.LIVE, Spread.MOMENTUM, Spread.LOST) and part:
            return self._spread_out(edit, part, alive)
        if edit.to is None:
            alive = self.num_alive(part) if alive is None else alive
            if spread is Spread.RANKING:
                return [Pool(part, _shared(edit, sum(alive[w.name] for w in part)))] if part else []
            return [Pool((w,), _shared(edit, alive[w.name])) for w in part]
        self._check_pattern(part, edit.to)
        scope = self._scope if edit.action is Action.PRUNE else Scope.PART  # to grow a part leaves the others alone
        allocate = erk if spread is Spread.ERK else self._allocate
        return allocate(self.weights, part, edit.to, self._pattern, scope) if part else []

    def _check_pattern(self, part: Sequence[Weight], to: float) -> None:
        try:
            for weight in part:
                self._pattern.check(weight, to)
        except GrowpruneError as error:
            remedy = "a method whose sparsity rises is told so by `start`, or by a lower `peak_density`"
            raise GrowpruneError(f"{error}; {remedy}") from error

    def _spread_of(self, edit: Edit) -> Spread | None:
        """How layers share an edit: some spreads are for one ranking only, where layers have no count of their own."""
        is_ranked = self._allocate is global_
        return edit.spread if is_ranked or edit.spread not in (Spread.LOST, Spread.ERK) else None

    def _fitting(self, within: float, part: tuple[Weight, ...], alive: Mapping[str, int] | None) -> Pool:
        """All of a part, or as much of it as leaves the model no more live groups than it may have."""
        alive = self.num_alive(self.weights) if alive is None else alive
        num_groups = sum(map(self._pattern.num_groups, self.weights))
        # where each layer rounds for itself, half a group of each may live too much, and the part is still to fit
        rounded = Fraction(len(self.weights), 2) if self._allocate is uniform else 0
        room = int(Fraction(str(within)) * num_groups + rounded) - sum(alive[weight.name] for weight in self.weights)
        now, most = sum(alive[weight.name] for weight in part), sum(map(self._pattern.most_alive, part))
        whole = sum(map(self._pattern.num_groups, part))
        return Pool(part, whole if now + room >= whole else max(now, min(now + room, most)))

    def _spread_out(self, edit: Edit, part: tuple[Weight, ...], alive: Mapping[str, int] | None) -> list[Pool]:
        """Pools of one weight each, which share the growth of all."""
        among = None if alive is not None else self._among(edit, part)
        alive = self.num_alive(part) if alive is None else alive
        now = [alive[weight.name] for weight in part]
        total = sum(pool.kept for pool in self.pools(replace(edit, spread=None), alive))
        room = [self._pattern.most_alive(weight) - count for weight, count in zip(part, now, strict=True)]
        if not sum(now) <= total <= sum(now) + sum(room):
            return [Pool(part, total)]  # which cannot be done, and the check of it says so
        more = shared_out(total - sum(now), now if among is None else among, room)
        return [Pool((w,), count + some) for w, count, some in zip(part, now, more, strict=True)]

    def _among(self, edit: Edit, part: Sequence[Weight]) -> Sequence[float] | None:
        """What the growth of each weight goes with; None for its live groups."""
        if edit.spread is Spread.MOMENTUM:
            return self._momenta(part)
        return [self._lost.get(weight.name, 0) for weight in part] if edit.spread is Spread.LOST else None

    def _momenta(self, part: Sequence[Weight]) -> list[float]:
        """The mean magnitude that the momentum of each weight's live elements has."""
        momentum = OneByOne(lambda name: self._gradients.scores(By.MOMENTUM, name))
        mask = self._choosing.masks()
        means = []
        for weight in part:
            check_finite(momentum(weight), weight)
            means.append(
                momentum(weight)[mask(weight)].abs().sum(dtype=torch.float64) / mask(weight).sum().clamp(min=1)
            )
        return [float(mean) for mean in torch.stack(means).tolist()]

    def apply(self, edit: Edit) -> None:
        if edit.by is not By.AS_IS and not (edit.to == 0 and self._is_whole(edit)):
            return self.select(self.pools(edit), edit)
        self._lost = {}
        return self._check_as_is(edit) if edit.by is By.AS_IS else self._grow_all(edit)

    def _is_whole(self, edit: Edit) -> bool:
        """Whether an edit to dense is not held back."""
        pools = self.pools(edit) if edit.within is not None else []
        return all(pool.kept == sum(map(self._pattern.num_groups, pool.weights)) for pool in pools)

    def _grow_all(self, edit: Edit) -> None:
        weights = self.weights_of(edit.part) if edit.action is Action.GROW else ()
        if edit.action is Action.GROW and not weights:
            what = "no weight of it may be pruned; give Partition keep_dense too"
            warn(f"{edit.part.name} has nothing to grow: {what}")
        for name in dict.fromkeys(w.parameter for w in weights):
            self.set_mask(name, torch.ones_like(self._parameters[name].mask()))

    def is_possible(self, edit: Edit) -> bool:
        """Whether an edit can reach its count."""
        alive = self.num_alive(self.weights)
        pools = self.pools(edit, alive)
        pools = _within_one(pools, alive, edit.action)
        return not any(_is_wrong_way(edit, pool, _total(pool, alive)) for pool in pools)

    def is_done(self, edit: Edit) -> bool:
        """Whether as many live as an edit leaves, in all: methods that move weights among layers count as done too."""
        alive = self.num_alive(self.weights)
        pools = self.pools(edit, alive)
        return sum(pool.kept for pool in pools) == sum(_total(pool, alive) for pool in pools)

    def select(self, pools: Sequence[Pool], edit: Edit) -> None:
        """Do what an edit does to some of its pools; if one of them cannot be, nothing changes."""
        alive = self.num_alive([weight for pool in pools for weight in pool.weights])
        pools = _within_one(pools, alive, edit.action)
        for pool in pools:
            self._check(pool, edit, _total(pool, alive))
        pools = [pool for pool in pools if pool.kept != _total(pool, alive)]
        weights = [weight for pool in pools for weight in pool.weights]
        if self.together is not None and self.together.can_choose(weights, edit):
            self._choose(pools, edit, alive, self.together.chosen, self.set_mask)
            left = self.num_alive(weights)
        elif self._choosing.can_choose_at_once(weights, edit):
            left = self._choosing.choose_at_once(pools, self.set_mask)
        else:
            values = self._choosing.values(edit)
            for weight in weights if edit.by is not By.RANDOM else ():
                check_finite(values(weight), weight)
            self._choose(pools, edit, alive, self._by_values(values), self.set_mask)
            left = self.num_alive(weights)
        self._lost = {weight.name: alive[weight.name] - left[weight.name] for weight in weights}
        if dead := [weight for weight in weights if not left[weight.name]]:
            warn(f"no weight lives in {_names(dead)}: {_why(dead, pools)}; see keep_dense")

    def _choose(
        self,
        pools: Sequence[Pool],
        edit: Edit,
        alive: Mapping[str, int],
        choose_of: Callable[[Pool, Edit, Values], Chosen],
        set_mask: SetMask,
    ) -> None:
        """Set the masks with which the best groups of each pool live; that of one parameter once."""
        written = Written(self._pattern, lambda name: self._parameters[name].mask().clone(), set_mask)
        mask = self._choosing.masks()
        for pool in pools:
            if pool.kept != _total(pool, alive):
                for weight, chosen in choose_of(pool, edit, mask):
                    written.write(weight, chosen)
        written.close()

    def _by_values(self, values: Values) -> Callable[[Pool, Edit, Values], Chosen]:
        return lambda pool, edit, mask: self._chosen(pool, edit, values, mask)

    def _chosen(self, pool: Pool, edit: Edit, values: Values, mask: Values) -> Chosen:
        return self._choosing.chosen(pool, edit, values, mask, number=self.num_edits)

    def preview(self, edit: Edit) -> list[Callable[[], None]]:
        """Prune, but leave optimizers alone; returns what undoes it, to be called in reverse.

        If it cannot be done, or fails on the way, all is as it was.
        """
        alive, values = self.num_alive(self.weights), self._choosing.values(edit)
        pools = _within_one(self.pools(edit, alive), alive, edit.action)
        for pool in pools:
            self._check(pool, edit, _total(pool, alive))
        with ExitStack() as undo:

            def set_mask(name: str, mask: Tensor) -> None:
                undo.callback(self._parameters[name].preview(mask))

            self._choose(pools, edit, alive, self._by_values(values), set_mask)
            return [undo.pop_all().close]

    def projected(self, edit: Edit, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By parameter: these values, but zero where pruning them would prune. No mask changes."""
        masks = self.kept(edit, values)
        return {name: torch.where(masks[name], tensor, 0) for name, tensor in values.items()}

    def kept(self, edit: Edit, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By parameter: which of these values would live if all lived now and an edit pruned them. No mask changes."""
        pools = self.pools(edit)
        ranked = {w.parameter: self._parameters[w.parameter].weight() for pool in pools for w in pool.weights}
        ranked |= values  # a ranking of the whole model has other weights too
        masks = {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in ranked.items()}

        def own(weight: Weight) -> Tensor:
            return weight.of(ranked[weight.parameter])  # type: ignore[no-any-return]

        for pool in pools:
            for weight, chosen in self._chosen(pool, edit, own, lambda w: torch.ones_like(own(w), dtype=torch.bool)):
                write_groups(self._pattern, weight.of(masks[weight.parameter]), weight, chosen)
        return {name: masks[name] for name in values}

    def candidates(self, edits: Sequence[Edit]) -> Keep | None:
        """What edits that grow by a dense gradient may look at: the best, and the live. None if all of it counts."""
        by_gradient = [edit for edit in edits if edit.by.needs_gradients]
        if any(edit.action is Action.PRUNE or edit.by is not By.GRADIENT for edit in by_gradient):
            return None
        if any(self._pattern.most_alive(w) < self._pattern.num_groups(w) for w in self.weights):
            return None  # what is pruned first makes room for its neighbours, and nobody knows yet what that will be
        if not self.can_be_bounded(edits):
            return None
        grown = self.num_grown(edits)

        def useful(name: str, gradient: Tensor) -> Tensor:
            mask = self._parameters[name].mask().clone()
            own = [weight for weight in self.weights if weight.parameter == name]
            before = self._choosing.masks()
            for weight, alive in zip(own, self.num_alive(own).values(), strict=True):
                pool = Pool((weight,), min(self._pattern.most_alive(weight), alive + grown[weight.name]))
                for _, chosen in self._chosen(pool, by_gradient[0], lambda w: w.of(gradient), before):
                    write_groups(self._pattern, weight.of(mask), weight, chosen)
            return mask

        return useful

    def num_grown(self, edits: Sequence[Edit]) -> dict[str, int]:
        """How many groups of each weight edits may grow at most, by its name. Those `can_be_bounded`."""
        alive = self.num_alive(self.weights)
        most, grown = dict(alive), dict.fromkeys(alive, 0)
        for before_it, edit in zip((None, *edits), edits, strict=False):
            lost = before_it if self._spread_of(edit) is Spread.LOST else None
            for pool in _within_one(self.pools(edit, alive), alive, edit.action):
                before, several = _total(pool, alive), len(pool.weights) > 1
                # of several ranked together the total is known, but what each has is a guess, and may be rounded
                more = max(0, pool.kept - before) + (len(pool.weights) * len(edits) if several else 0)
                for weight in pool.weights if edit.action is Action.GROW else ():
                    more = more if lost is None else _most_lost(lost, most[weight.name])
                    grown[weight.name] = min(self._pattern.num_groups(weight), grown[weight.name] + more)
                    most[weight.name] = min(self._pattern.num_groups(weight), most[weight.name] + more)
                for weight in pool.weights:
                    alive[weight.name] = alive[weight.name] * pool.kept // max(1, before) if several else pool.kept
        return grown

    def can_be_bounded(self, edits: Sequence[Edit]) -> bool:
        """Whether `num_grown` knows the growth of edits: not if they rank weights together, but not always the same."""
        alive = self.num_alive(self.weights)
        pools = [self.pools(edit, alive) for edit in edits]
        is_ranked = any(len(pool.weights) > 1 for several in pools for pool in several)
        changed = {frozenset(weight for pool in several for weight in pool.weights) for several in pools}
        is_known = all(self._spread_of(edit) in (None, Spread.LOST) for edit in edits)
        return is_known and (not is_ranked or len(changed) == 1)

    def _check(self, pool: Pool, edit: Edit, alive: int) -> None:
        """Raise if an edit cannot reach its count."""
        if _is_wrong_way(edit, pool, alive):
            raise GrowpruneError(
                f"cannot {edit.action.value} to sparsity {edit.to}: that is {pool.kept} alive, but {alive} are alive "
                f"in {_names(pool.weights)}; {'grow' if edit.action is Action.PRUNE else 'prune'} first"
            )
        most = sum(self._pattern.most_alive(weight) for weight in pool.weights)
        if pool.kept > most:
            raise GrowpruneError(
                f"cannot {edit}: that is {pool.kept} alive in {_names(pool.weights)}, which have room for {most}"
            )

    def _check_as_is(self, edit: Edit) -> None:
        """Raise unless as many live already as an edit leaves; where layers share by rounding, one may have one more.

        Each pool by itself, and not only in all: the edits that follow ask for the same of it.
        """
        alive = self.num_alive(self.weights_of(edit.part))
        pools = self.pools(edit, alive)
        counts = [_total(pool, alive) for pool in pools]
        is_in_all = sum(counts) == sum(pool.kept for pool in pools)
        for pool, count in zip(pools, counts, strict=True):
            if abs(pool.kept - count) > (1 if is_in_all else 0):
                remedy = "initial_mask='magnitude' prunes to that" if count > pool.kept else "begin with a sparser plan"
                remedy = "allocation='global' counts all layers together" if is_in_all else remedy
                raise GrowpruneError(
                    f"the masks cannot stay as they are: {count} are alive in {_names(pool.weights)}, but the plan "
                    f"begins with {pool.kept} (sparsity {edit.to:.4g}); {remedy}"
                )

    def num_alive(self, weights: Sequence[Weight]) -> dict[str, int]:
        """How many groups of each weight live, by its name; the device is waited for once."""
        mask = self._choosing.masks()
        full = {w.name: self._pattern.num_groups(w) for w in weights if self._parameters[w.parameter].is_known_full}
        others = [weight for weight in weights if weight.name not in full]
        counts = [count_groups(self._pattern, mask(weight), weight) for weight in others]
        counted = dict(zip((w.name for w in others), in_one_go(counts), strict=True))
        return {weight.name: full.get(weight.name, counted.get(weight.name, 0)) for weight in weights}

    def set_mask(self, name: str, mask: Tensor) -> None:
        """Let exactly these weights of a parameter live; what is new is zero, and so is its state in optimizers."""
        parameter = self._parameters[name]
        with self._optimizers.following(parameter):
            parameter.set_mask(mask)


def _is_wrong_way(edit: Edit, pool: Pool, alive: int) -> bool:
    """Whether an edit would have to prune in order to grow, or to grow in order to prune."""
    return pool.kept != alive and (pool.kept > alive) is (edit.action is Action.PRUNE)


def _shared(edit: Edit, alive: int) -> int:
    """How many live after an edit by a share of them, rounded down, in exact arithmetic."""
    change = int(Fraction(str(edit.share)) * alive)
    return alive - change if edit.action is Action.PRUNE else alive + change


def _most_lost(edit: Edit, alive: int) -> int:
    """How many an edit may take of a weight that has at most so many."""
    is_own = edit.share is not None and edit.spread is None
    return alive - _shared(edit, alive) if is_own else alive


def _total(pool: Pool, alive: Mapping[str, int]) -> int:
    return sum(alive[weight.name] for weight in pool.weights)


def _within_one(pools: Sequence[Pool], alive: Mapping[str, int], action: Action) -> list[Pool]:
    """Pools of which none asks for one group too many (or, to grow, too few), with the same total.

    ERK's counts add up to an exact total, so with a rising sparsity the rounded count of a layer may rise by one. What
    one layer lacks, the next that has it gives; and when such layers grow, none has to give it back.
    """
    sign = 1 if action is Action.PRUNE else -1
    counts = [_total(pool, alive) for pool in pools]
    kept = [pool.kept - sign * (pool.kept == count + sign) for pool, count in zip(pools, counts, strict=True)]
    lacking = sign * (sum(pool.kept for pool in pools) - sum(kept))
    for i, count in enumerate(counts):
        more = min(lacking, max(0, sign * (count - kept[i])))
        kept[i], lacking = kept[i] + sign * more, lacking - more
    return [replace(pool, kept=k) for pool, k in zip(pools, kept, strict=True)] if not lacking else list(pools)


def _why(dead: Sequence[Weight], pools: Sequence[Pool]) -> str:
    """What left none of these weights alive."""
    if any(len(pool.weights) > 1 and not set(pool.weights).isdisjoint(dead) for pool in pools):
        return "one ranking of several layers left them none; allocation 'uniform' or 'erk' gives each layer its share"
    return "too small for this sparsity"


def _names(weights: Sequence[Weight]) -> str:
    return ", ".join(w.name for w in weights[:3]) + (f" and {len(weights) - 3} more" if len(weights) > 3 else "")
