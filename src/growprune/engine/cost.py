"""Cost estimates without training: density and FLOPs of each phase, from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from growprune.engine.recipe import Recipe
from growprune.engine.state import prunes_after_fork
from growprune.plan import Action, Plan, ScheduledPhase, Spread, walk
from growprune.sparse.flops import count_flops
from growprune.sparse.model import SparseModel

Densities = dict[str, float]
"""The density of each weight."""


@dataclass(frozen=True)
class Cost:
    """Density and FLOPs of one phase, for one example of the data."""

    scheduled: ScheduledPhase
    density: float
    """The fraction of prunable weights that are alive."""
    forward_flops: int
    epochs: float
    training_flops: int
    """FLOPs of the whole phase: one forward pass and twice that for the backward pass, in every epoch."""


@dataclass(frozen=True)
class Estimate:
    costs: list[Cost]
    dense_flops: int
    plan: Plan
    is_exact: bool
    """False if densities of layers are known only in training: global allocation, and growth by momentum."""
    state_bytes: int
    """Values, gradients and optimizer state in float32 at the peak, which sharding divides among ranks."""
    mask_bytes: int
    """Bytes of masks, which every rank holds."""
    can_be_sharded: bool
    """True if the recipe's storage supports sharding."""
    merged_density: float
    """The peak density where the branches of a fork are combined, before any training; 0 without forks. With global
    allocation all parts are dense there, because they can be pruned only together."""

    @property
    def training_flops(self) -> int:
        return sum(cost.training_flops for cost in self.costs)

    @property
    def epochs(self) -> float:
        return sum(cost.epochs for cost in self.costs)

    def bytes_per_rank(self, ranks: int = 1) -> int:
        """Peak training memory, without activations and, with compact storage, without one dense layer."""
        return -(-self.state_bytes // ranks) + self.mask_bytes

    @property
    def peak_density(self) -> float:
        return max(self.merged_density, *(cost.density for cost in self.costs))


def estimate(recipe: Recipe) -> Estimate:
    """Estimate the cost of a recipe from shapes alone. Only a plan in iterations needs the data, to count them."""
    per_epoch = recipe.num_iterations_per_epoch() if recipe.counts_iterations else 1
    model = recipe.shapes()
    with torch.device("meta" if recipe.task.initialises_modules else "cpu"):
        example = recipe.task.example()
    # masked, whatever it will be: only shapes are looked at, and compact layers compute on no meta device
    resolved = recipe.resolve(model, per_epoch)
    sparse, plan = SparseModel(model, **resolved.sparse_settings()), resolved.plan
    flops = count_flops(model, example)
    now = before_fork = after_fork = dict.fromkeys((w.name for w in sparse.weights), 1.0)
    costs, merged = [], 0.0
    schedule = tuple(walk(plan))
    for scheduled in schedule:
        if scheduled.branch == 0:
            before_fork, after_fork = now, dict(now)
        now = _edited(sparse, scheduled, now if scheduled.branch is None else before_fork)
        alive = _alive(sparse, now)
        epochs = scheduled.phase.num_iterations(per_epoch) / per_epoch
        forward = flops.at(now)
        costs.append(Cost(scheduled, alive, forward, epochs, round(3 * forward * epochs)))
        if scheduled.returns is not None:  # what no branch returns is as it was before the fork
            after_fork |= {w.name: now[w.name] for w in sparse.editor.weights_of(scheduled.returns)}
            after_fork |= _pruned_early(sparse, scheduled, schedule, after_fork)
            if scheduled.is_last_branch:
                now = after_fork
                merged = max(merged, _alive(sparse, after_fork))
    spreads = {edit.spread for scheduled in schedule for edit in scheduled.phase.edits}
    is_exact = not resolved.allocation.startswith("global") and not spreads & {Spread.RANKING, Spread.MOMENTUM}
    is_compact, prunable = recipe.storage == "compact", sparse.num_prunable
    others = sum(parameter.numel() for parameter in model.parameters()) - prunable
    values = others + (round(max(cost.density for cost in costs) * prunable) if is_compact else prunable)
    bits = -(-prunable // 8) + -(-prunable // 128)  # and how many live before each 1,024th
    return Estimate(
        costs,
        flops.dense,
        plan,
        is_exact,
        state_bytes=4 * (2 + recipe.optimizer.num_states) * values,
        mask_bytes=bits if is_compact else prunable,
        can_be_sharded=is_compact,
        merged_density=merged,
    )


def _alive(sparse: SparseModel, density: Densities) -> float:
    return sum(density[w.name] * w.numel for w in sparse.weights) / sparse.num_prunable


def _pruned_early(
    sparse: SparseModel, scheduled: ScheduledPhase, schedule: Sequence[ScheduledPhase], density: Densities
) -> Densities:
    """The densities after a branch prunes its part before returning it, as a cursor does."""
    assert scheduled.returns is not None
    own = set(scheduled.returns.tensors)
    sizes, alive = _groups(sparse, density)
    edits, editor = prunes_after_fork(scheduled, schedule), sparse.editor
    pools = [pool for edit in edits if edit.to for pool in editor.pools(edit, alive, is_estimate=True)]
    early = [pool for pool in pools if {weight.parameter for weight in pool.weights} <= own]
    return {w.name: pool.kept / sum(sizes[w.name] for w in pool.weights) for pool in early for w in pool.weights}


def _groups(sparse: SparseModel, density: Densities) -> tuple[dict[str, int], dict[str, int]]:
    """For each weight: the number of groups of its pattern, and how many are alive."""
    sizes = {w.name: sparse.pattern.num_groups(w) for w in sparse.weights}
    return sizes, {name: round(density[name] * size) for name, size in sizes.items()}


def _edited(sparse: SparseModel, scheduled: ScheduledPhase, density: Densities) -> Densities:
    """The densities after the edits of a phase. Weights ranked together are assumed to get equal densities."""
    density, editor = dict(density), sparse.editor
    for edit in scheduled.phase.edits:
        if edit.to == 0 and edit.within is None:
            if edit.action is Action.GROW:
                density |= {w.name: 1.0 for w in editor.weights_of(edit.part)}
            continue
        sizes, alive = _groups(sparse, density)
        for pool in editor.pools(edit, alive, is_estimate=True):
            total = sum(alive[w.name] for w in pool.weights)
            if edit.spread is Spread.RANKING:
                density |= {w.name: density[w.name] * pool.kept / max(1, total) for w in pool.weights}
            else:
                density |= {w.name: pool.kept / sum(sizes[w.name] for w in pool.weights) for w in pool.weights}
    return density
