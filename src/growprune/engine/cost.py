"""What a recipe will cost, before anyone pays for it: density and FLOPs of each phase, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from growprune.engine.recipe import Recipe
from growprune.flops import count_flops
from growprune.plan import Action, Plan, ScheduledPhase, walk
from growprune.sparse import SparseModel


@dataclass(frozen=True)
class Cost:
    """One phase of a plan, priced for one example of the data."""

    scheduled: ScheduledPhase
    density: float
    """The share of the prunable weights that live."""
    forward_flops: int
    training_flops: int
    """Of the whole phase: forward and twice as much backward, in every epoch."""


@dataclass(frozen=True)
class Estimate:
    costs: list[Cost]
    dense_flops: int
    plan: Plan
    is_exact: bool
    """False for a global ranking: how it will share the weights among layers is not known before."""

    @property
    def training_flops(self) -> int:
        return sum(cost.training_flops for cost in self.costs)

    @property
    def epochs(self) -> int:
        return sum(cost.scheduled.phase.epochs for cost in self.costs)


def estimate(recipe: Recipe) -> Estimate:
    """Walk a recipe's plan over a model without weights."""
    with torch.device("meta"):
        model, example = recipe.task.build_model(), recipe.task.example()
    sparse, plan = recipe.sparse_model(model), recipe.plan(model)
    flops = count_flops(model, example)
    density = {w.name: 1.0 for w in sparse.weights}
    combined = density
    costs = []
    for scheduled in walk(plan):
        before = combined if scheduled.branch is not None else density
        density = _edited(sparse, scheduled, before)
        alive = sum(density[w.name] * w.numel for w in sparse.weights) / sparse.num_prunable
        forward = flops.at(density)
        costs.append(Cost(scheduled, alive, forward, 3 * forward * scheduled.phase.epochs))
        combined, density = _combined(sparse, scheduled, combined, density)
    return Estimate(costs, flops.dense, plan, is_exact=recipe.allocation != "global")


def _edited(sparse: SparseModel, scheduled: ScheduledPhase, density: dict[str, float]) -> dict[str, float]:
    density = dict(density)
    for edit in scheduled.phase.edits:
        if edit.to == 0 and edit.action is Action.GROW:
            density |= {w.name: 1.0 for w in sparse.weights_of(edit.part)}
        for pool in sparse.pools(edit) if edit.to > 0 else []:
            size = sum(sparse.pattern.num_groups(w) for w in pool.weights)
            density |= {w.name: pool.kept / size for w in pool.weights}
    return density


def _combined(
    sparse: SparseModel, scheduled: ScheduledPhase, combined: dict[str, float], density: dict[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """(what the branches to come start from, what comes next starts from)."""
    if scheduled.returns is None:
        return density, density
    if not scheduled.is_last_branch:
        return combined, density
    # after a fork every part comes back as its branch grew it, dense
    merged = {w.name: 1.0 for w in sparse.weights}
    return merged, merged
