"""Carrying out an edit: counts.py says how many of which weights live after it, and choosing.py which they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from growprune.errors import GrowpruneError, warn
from growprune.masks.allocation import Pool, Scope
from growprune.masks.layers import Weight
from growprune.masks.patterns import Pattern, write_groups
from growprune.masks.scores import check_finite
from growprune.plan import Action, By, Edit
from growprune.sparse.choosing import Choosing, Chosen, SetMask, Together, Values, Written
from growprune.sparse.counts import Counts, total_of, within_one
from growprune.sparse.gradients import Gradients, Keep
from growprune.sparse.optimizers import Optimizers
from growprune.storage import SparseParameter


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
        self.counts = Counts(weights, parameters, gradients, pattern=pattern, allocation=allocation, scope=scope)
        self._choosing = Choosing(parameters, gradients, pattern, seed)
        self._parameters, self._optimizers, self._pattern = parameters, optimizers, pattern
        self.num_edits = 0
        """How many edits there were, which makes each random one draw its own numbers."""
        self.together: Together | None = None
        """If the weights are sharded: what chooses without gathering them."""

    def apply(self, edit: Edit) -> None:
        if edit.by is not By.AS_IS and not (edit.to == 0 and self._is_whole(edit)):
            return self.select(self.counts.pools(edit), edit)
        self.counts.lost = {}
        return self._check_as_is(edit) if edit.by is By.AS_IS else self._grow_all(edit)

    def _is_whole(self, edit: Edit) -> bool:
        """Whether an edit to dense is not held back."""
        pools = self.counts.pools(edit) if edit.within is not None else []
        return all(pool.kept == sum(map(self._pattern.num_groups, pool.weights)) for pool in pools)

    def _grow_all(self, edit: Edit) -> None:
        weights = self.counts.weights_of(edit.part) if edit.action is Action.GROW else ()
        if edit.action is Action.GROW and not weights:
            what = "no weight of it may be pruned; give Partition keep_dense too"
            warn(f"{edit.part.name} has nothing to grow: {what}")
        for name in dict.fromkeys(w.parameter for w in weights):
            self.set_mask(name, torch.ones_like(self._parameters[name].mask()))

    def is_possible(self, edit: Edit) -> bool:
        """Whether an edit can reach its count."""
        alive = self.counts.num_alive(self.counts.weights)
        pools = self.counts.pools(edit, alive)
        pools = within_one(pools, alive, edit.action)
        return not any(_is_wrong_way(edit, pool, total_of(pool, alive)) for pool in pools)

    def is_done(self, edit: Edit) -> bool:
        """Whether as many live as an edit leaves, in all: methods that move weights among layers count as done too."""
        alive = self.counts.num_alive(self.counts.weights)
        pools = self.counts.pools(edit, alive)
        return sum(pool.kept for pool in pools) == sum(total_of(pool, alive) for pool in pools)

    def select(self, pools: Sequence[Pool], edit: Edit) -> None:
        """Do what an edit does to some of its pools; if one of them cannot be, nothing changes."""
        alive = self.counts.num_alive([weight for pool in pools for weight in pool.weights])
        pools = within_one(pools, alive, edit.action)
        for pool in pools:
            self._check(pool, edit, total_of(pool, alive))
        pools = [pool for pool in pools if pool.kept != total_of(pool, alive)]
        weights = [weight for pool in pools for weight in pool.weights]
        if self.together is not None and self.together.can_choose(weights, edit):
            self._choose(pools, edit, alive, self.together.chosen, self.set_mask)
            left = self.counts.num_alive(weights)
        elif self._choosing.can_choose_at_once(weights, edit):
            left = self._choosing.choose_at_once(pools, self.set_mask)
        else:
            values = self._choosing.values(edit)
            for weight in weights if edit.by is not By.RANDOM else ():
                check_finite(values(weight), weight)
            self._choose(pools, edit, alive, self._by_values(values), self.set_mask)
            left = self.counts.num_alive(weights)
        self.counts.lost = {weight.name: alive[weight.name] - left[weight.name] for weight in weights}
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
            if pool.kept != total_of(pool, alive):
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
        alive, values = self.counts.num_alive(self.counts.weights), self._choosing.values(edit)
        pools = within_one(self.counts.pools(edit, alive), alive, edit.action)
        for pool in pools:
            self._check(pool, edit, total_of(pool, alive))
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
        pools = self.counts.pools(edit)
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
        if any(self._pattern.most_alive(w) < self._pattern.num_groups(w) for w in self.counts.weights):
            return None  # what is pruned first makes room for its neighbours, and nobody knows yet what that will be
        if not self.counts.can_be_bounded(edits):
            return None
        grown = self.counts.num_grown(edits)

        def useful(name: str, gradient: Tensor) -> Tensor:
            mask = self._parameters[name].mask().clone()
            own = [weight for weight in self.counts.weights if weight.parameter == name]
            before = self._choosing.masks()
            for weight, alive in zip(own, self.counts.num_alive(own).values(), strict=True):
                pool = Pool((weight,), min(self._pattern.most_alive(weight), alive + grown[weight.name]))
                for _, chosen in self._chosen(pool, by_gradient[0], lambda w: w.of(gradient), before):
                    write_groups(self._pattern, weight.of(mask), weight, chosen)
            return mask

        return useful

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
        alive = self.counts.num_alive(self.counts.weights_of(edit.part))
        pools = self.counts.pools(edit, alive)
        counts = [total_of(pool, alive) for pool in pools]
        is_in_all = sum(counts) == sum(pool.kept for pool in pools)
        for pool, count in zip(pools, counts, strict=True):
            if abs(pool.kept - count) > (1 if is_in_all else 0):
                remedy = "initial_mask='magnitude' prunes to that" if count > pool.kept else "begin with a sparser plan"
                remedy = "allocation='global' counts all layers together" if is_in_all else remedy
                raise GrowpruneError(
                    f"the masks cannot stay as they are: {count} are alive in {_names(pool.weights)}, but the plan "
                    f"begins with {pool.kept} (sparsity {edit.to:.4g}); {remedy}"
                )

    def set_mask(self, name: str, mask: Tensor) -> None:
        """Let exactly these weights of a parameter live; what is new is zero, and so is its state in optimizers."""
        parameter = self._parameters[name]
        with self._optimizers.following(parameter):
            parameter.set_mask(mask)


def _is_wrong_way(edit: Edit, pool: Pool, alive: int) -> bool:
    """Whether an edit would have to prune in order to grow, or to grow in order to prune."""
    return pool.kept != alive and (pool.kept > alive) is (edit.action is Action.PRUNE)


def _why(dead: Sequence[Weight], pools: Sequence[Pool]) -> str:
    """What left none of these weights alive."""
    if any(len(pool.weights) > 1 and not set(pool.weights).isdisjoint(dead) for pool in pools):
        return "one ranking of several layers left them none; allocation 'uniform' or 'erk' gives each layer its share"
    return "too small for this sparsity"


def _names(weights: Sequence[Weight]) -> str:
    return ", ".join(w.name for w in weights[:3]) + (f" and {len(weights) - 3} more" if len(weights) > 3 else "")
