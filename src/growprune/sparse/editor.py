"""Apply an edit to the masks: counts.py says how many groups of each weight are live afterwards, this file which ones.

The weights of a pool are ranked together, and the best groups are live. The dense tensors of at most one parameter are
in memory at a time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from growprune.errors import GrowpruneError, warn
from growprune.masks.allocation import Pool
from growprune.masks.layers import Weight
from growprune.masks.patterns import count_groups, in_one_go, write_groups
from growprune.masks.ranking import check_finite, choose, edit_keys, key_bits_of, salt_of
from growprune.masks.zeros import masks_of_zeros
from growprune.plan import Action, By, Edit
from growprune.sparse.counts import Counts, total_of, within_one
from growprune.sparse.gradients import Gradients
from growprune.sparse.optimizers import Optimizers
from growprune.storage import SparseParameter

Read = Callable[[Weight], tuple[Tensor, Tensor]]
"""Returns the values that a weight is ranked by, and its mask."""

SetMask = Callable[[str, Tensor], None]
"""Takes the name of a parameter, and its new mask."""

Chosen = Iterator[tuple[Weight, Iterator[Tensor]]]
"""For each weight of a pool, in order: which of its groups are live, a few rows at a time."""


class Editor:
    """Change masks, and the state of optimizers with them."""

    def __init__(self, counts: Counts, optimizers: Optimizers, *, seed: int, rescale: bool = False) -> None:
        self.counts, self._optimizers, self._seed = counts, optimizers, seed
        self._stored, self._gradients, self._pattern = counts.stored, counts.gradients, counts.pattern
        self.num_edits = 0
        """The number of edits so far, so that each random edit draws different numbers."""
        self._warned_of: set[str] = set()
        """The names of weights without live elements that a warning has named."""
        self.rescales = rescale
        """True if a random mask, which only untrained weights get, keeps activations as large as they were."""

    def apply(self, edit: Edit) -> None:
        if edit.by is By.AS_IS:
            self._keep_zeros()
            self._check_as_is(edit)
        elif edit.to == 0 and edit.within is None:
            self._grow_all(edit)
        else:
            alive = self.counts.num_alive(self.counts.concerned(edit))
            pools = self.counts.pools(edit, alive)
            self._grow_all(edit) if edit.to == 0 and self._is_whole(pools) else self.select(pools, edit, alive)
        self.num_edits += 1

    def apply_within(self, edit: Edit, names: set[str]) -> None:
        """Apply an edit to those of its pools that lie within these parameters."""
        pools = self.counts.pools(edit) if edit.to else []
        self.select([pool for pool in pools if {weight.parameter for weight in pool.weights} <= names], edit)

    def _is_whole(self, pools: Sequence[Pool]) -> bool:
        """True if growth to dense is not limited."""
        return all(pool.kept == sum(map(self._pattern.num_groups, pool.weights)) for pool in pools)

    def _grow_all(self, edit: Edit) -> None:
        self.counts.lost = {}
        weights = self.counts.weights_of(edit.part) if edit.action is Action.GROW else ()
        if edit.action is Action.GROW and not weights:
            what = "all its weights are kept dense; pass the same keep_dense to Partition"
            warn(f"{edit.part.name} has nothing to grow: {what}")
        for name in dict.fromkeys([weight.parameter for weight in weights]):
            stored = self._stored[name]
            self.set_mask(name, torch.ones(stored.shape, dtype=torch.bool, device=stored.parameter.device))

    def is_possible(self, edit: Edit) -> bool:
        """True if an edit can reach its count."""
        alive = self.counts.num_alive(self.counts.weights)
        pools = within_one(self.counts.pools(edit, alive), alive, edit.action)
        return not any(_is_wrong_way(edit, pool, total_of(pool, alive)) for pool in pools)

    def is_done(self, edit: Edit) -> bool:
        """True if the total of live weights is already what the edit leaves, however layers share it."""
        alive = self.counts.num_alive(self.counts.weights)
        pools = self.counts.pools(edit, alive)
        return sum(pool.kept for pool in pools) == sum(total_of(pool, alive) for pool in pools)

    def select(self, pools: Sequence[Pool], edit: Edit, alive: Mapping[str, int] | None = None) -> None:
        """Apply an edit to some of its pools. If one of them is impossible, nothing changes.

        Args:
            alive: the number of live groups of each weight, by name; by default counted.
        """
        alive = self.counts.num_alive([w for pool in pools for w in pool.weights]) if alive is None else alive
        pools = self.changed(pools, edit, alive)
        weights = [weight for pool in pools for weight in pool.weights]
        reader = Reader(self._stored, self._gradients, edit)
        for weight in weights if edit.by is not By.RANDOM else ():
            check_finite(reader.values(weight), weight)
        left = self._choose(pools, lambda pool: self._chosen(pool, edit, reader.read), reader, self.set_mask)
        self.counts.lost = {weight.name: alive[weight.name] - left[weight.name] for weight in weights}
        if self.rescales and edit.by is By.RANDOM and edit.action is Action.PRUNE:
            self._rescale(weights, alive, left)
        self.warn_of_dead([weight for weight in weights if not left[weight.name]], pools)

    @torch.no_grad()
    def _rescale(self, weights: Sequence[Weight], alive: Mapping[str, int], left: Mapping[str, int]) -> None:
        """Multiply what is left, so that a unit that sums fewer inputs gives numbers as large: times 1 / sqrt(density).

        Without it, signals fade from layer to layer in models without normalization, and training may not begin.
        """
        before, after = Counter[str](), Counter[str]()
        for weight in weights:
            before[weight.parameter] += alive[weight.name]
            after[weight.parameter] += left[weight.name]
        for name in before:
            self._stored[name].parameter.mul_(math.sqrt(before[name] / max(1, after[name])))

    def warn_of_dead(self, dead: Sequence[Weight], pools: Sequence[Pool]) -> None:
        """Warn once about each layer that has no live weight left."""
        if not (new := [weight for weight in dead if weight.name not in self._warned_of]):
            return
        self._warned_of |= {weight.name for weight in new}
        layers, it = (f"layer {_names(new)} was", "it") if len(new) == 1 else (f"layers {_names(new)} were", "them")
        is_ranking = any(len(pool.weights) > 1 and not set(pool.weights).isdisjoint(new) for pool in pools)
        small = "" if is_ranking else f", too small for this sparsity; add {it} to keep_dense"
        warn(f"{layers} pruned to zero weights" + (small or f"; add {it} to keep_dense or use allocation='uniform'"))

    def changed(self, pools: Sequence[Pool], edit: Edit, alive: Mapping[str, int]) -> list[Pool]:
        """Return the pools that an edit changes. Raise if the edit is impossible."""
        totals = [(pool, total_of(pool, alive)) for pool in within_one(pools, alive, edit.action)]
        for pool, total in totals:
            self._check(pool, edit, total)
        return [pool for pool, total in totals if pool.kept != total]

    def _choose(
        self, pools: Sequence[Pool], chosen_of: Callable[[Pool], Chosen], reader: Reader, set_mask: SetMask
    ) -> dict[str, int]:
        """Set the masks so that the best groups of each pool are live. Return the live groups by weight."""
        name, mask, left, counted = "", None, {}, {}
        for pool in pools:
            for weight, chosen in chosen_of(pool):
                if mask is None or weight.parameter != name:
                    if mask is not None:
                        set_mask(name, mask)
                    mask = None  # before the next is made
                    name, mask = weight.parameter, reader.whole_mask(weight).clone()
                write_groups(self._pattern, weight.of(mask), weight, chosen)
                left[weight.name] = pool.kept
                if len(pool.weights) > 1:
                    counted[weight.name] = count_groups(self._pattern, weight.of(mask), weight)
        if mask is not None:
            set_mask(name, mask)
        return left | dict(zip(counted, in_one_go(list(counted.values())), strict=True))

    def _chosen(self, pool: Pool, edit: Edit, read: Read) -> Chosen:
        """Yield, for each weight in order, which groups are among the best `pool.kept` of the pool."""
        parameters = [self._stored[weight.parameter].parameter for weight in pool.weights]
        is_wide = torch.float64 in [parameter.dtype for parameter in parameters]
        dtype = torch.float64 if is_wide else torch.float32
        salts = [salt_of(self._seed, self.num_edits, weight.name) for weight in pool.weights]
        sources = [
            edit_keys(edit, weight, self._pattern, read=read, salt=salt, dtype=dtype)
            for weight, salt in zip(pool.weights, salts, strict=True)
        ]
        walks = choose(sources, pool.kept, bits=key_bits_of(edit, dtype), device=parameters[0].device)
        return zip(pool.weights, walks, strict=True)

    def preview(self, edit: Edit) -> Callable[[], None]:
        """Prune without touching optimizers, and return a function that undoes it. On failure, nothing changes."""
        alive, reader = self.counts.num_alive(self.counts.weights), Reader(self._stored, self._gradients, edit)
        pools = self.changed(self.counts.pools(edit, alive), edit, alive)
        with ExitStack() as undo:

            def set_mask(name: str, mask: Tensor) -> None:
                undo.callback(self._stored[name].preview(mask))

            self._choose(pools, lambda pool: self._chosen(pool, edit, reader.read), reader, set_mask)
            return undo.pop_all().close

    def projected(self, edit: Edit, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return these values by parameter, with zeros where the edit would prune them. No mask changes."""
        masks = self.kept(edit, values)
        return {name: torch.where(masks[name], tensor, 0) for name, tensor in values.items()}

    def kept(self, edit: Edit, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return which of these values an edit would keep if all were live now, by parameter. No mask changes."""
        pools = self.counts.pools(edit)
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

    def _check(self, pool: Pool, edit: Edit, alive: int) -> None:
        """Raise if an edit cannot reach its count."""
        if _is_wrong_way(edit, pool, alive):
            raise GrowpruneError(
                f"cannot {edit.action.value} {_names(pool.weights)} to sparsity {edit.to}: that needs {pool.kept} live "
                f"weights, but {alive} are live; {'grow' if edit.action is Action.PRUNE else 'prune'} first"
            )
        most = sum(self._pattern.most_alive(weight) for weight in pool.weights)
        if pool.kept > most:
            raise GrowpruneError(
                f"cannot {edit}: that needs {pool.kept} live weights in {_names(pool.weights)}, but the pattern allows "
                f"at most {most}"
            )

    def _keep_zeros(self) -> None:
        """Prune the zeros of a model whose weights are all live, if it was pruned earlier or by another tool.

        Optimizers are attached by now, and follow if the storage replaces parameters.
        """
        if self._gradients.shares is None and all(bool(stored.mask().all()) for stored in self._stored.values()):
            masks = masks_of_zeros(lambda name: self._stored[name].weight(), self.counts.weights, self._pattern)
            for name, mask in masks.items():
                self.set_mask(name, mask)

    def _check_as_is(self, edit: Edit) -> None:
        """Raise unless each pool already has as many live groups as the edit leaves, up to one group of rounding.

        Each pool is checked, not only the total, because later edits need the same of it.
        """
        self.counts.lost = {}
        alive = self.counts.num_alive(self.counts.weights_of(edit.part))
        pools = self.counts.pools(edit, alive)
        counts = [total_of(pool, alive) for pool in pools]
        is_in_all = sum(counts) == sum(pool.kept for pool in pools)
        for pool, count in zip(pools, counts, strict=True):
            if abs(pool.kept - count) > (1 if is_in_all else 0):
                remedy = "use initial_mask='magnitude'" if count > pool.kept else "start the plan at a higher sparsity"
                remedy = "use allocation='global', which counts all layers together" if is_in_all else remedy
                raise GrowpruneError(
                    f"initial_mask='as_is' does not fit: {_names(pool.weights)} has {count} live weights, but the plan "
                    f"starts with {pool.kept} (sparsity {edit.to:.4g}); {remedy}"
                )

    def set_mask(self, name: str, mask: Tensor) -> None:
        """Set the mask of a parameter. New live weights start at zero, and so does their optimizer state."""
        with self._optimizers.following(name) as stored:
            stored.set_mask(mask)


class Reader:
    """Read dense masks and the values that an edit ranks by, one parameter at a time."""

    def __init__(self, stored: Mapping[str, SparseParameter], gradients: Gradients, edit: Edit) -> None:
        self._stored, self._gradients, self._by = stored, gradients, edit.by
        self._name = ""
        self._seen: dict[str, Tensor] = {}

    def _of(self, weight: Weight, what: str, make: Callable[[], Tensor]) -> Tensor:
        if weight.parameter != self._name:
            self._name, self._seen = weight.parameter, {}  # before the next are made
        if what not in self._seen:
            self._seen[what] = make()
        return self._seen[what]

    def whole_mask(self, weight: Weight) -> Tensor:
        """Return the mask of the parameter that a weight belongs to."""
        return self._of(weight, "mask", self._stored[weight.parameter].mask)

    def mask(self, weight: Weight) -> Tensor:
        return weight.of(self.whole_mask(weight))  # type: ignore[no-any-return]

    def values(self, weight: Weight) -> Tensor:
        scores = partial(self._gradients.scores, self._by, weight.parameter)
        make = self._stored[weight.parameter].weight if self._by is By.MAGNITUDE else scores
        return weight.of(self._of(weight, "values", make))  # type: ignore[no-any-return]

    def read(self, weight: Weight) -> tuple[Tensor, Tensor]:
        """Return the values and the mask of a weight. A random edit needs no values."""
        mask = self.mask(weight)
        return (mask if self._by is By.RANDOM else self.values(weight)), mask


def _is_wrong_way(edit: Edit, pool: Pool, alive: int) -> bool:
    """True if an edit would have to prune in order to grow, or to grow in order to prune."""
    return pool.kept != alive and (pool.kept > alive) is (edit.action is Action.PRUNE)


def _names(weights: Sequence[Weight]) -> str:
    return ", ".join(w.name for w in weights[:3]) + (f" and {len(weights) - 3} more" if len(weights) > 3 else "")
