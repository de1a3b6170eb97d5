"""Choose the lengths of a method's phases so that they fill a given training. Standard library only.

Comparisons and trainers both use `fill_lengths` for the lengths that a user left out. It inspects the options of the
method, so a new method needs no change here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from growprune.plan.phases import Plan, walk
from growprune.plan.settings import check_counts

SEARCH, ROUNDS = 0.4, 2
"""The share of the training in which grow-and-prune searches, and how often it grows each part in that time."""
LEAST_EDITS = 40
"""The fewest edits in a training, for a method that edits every few iterations."""


def fill_lengths(
    method: Callable[..., Plan], given: Mapping[str, Any], total: int, *, parts: int, branches: int = 1
) -> dict[str, int]:
    """Return the lengths with which a method's phases fill a whole training.

    Args:
        given: the options that are already set. Lengths among them are kept; the others follow from them.
        total: the length of the training, in iterations for a method that takes `iterations`, else in epochs. If the
            given lengths exceed it, so do the returned ones.
        parts: the number of parts of the model.
        branches: the number of branches that each step trains. All of them count.

    Examples:
        >>> from growprune.methods import cyclic_gap, gmp
        >>> fill_lengths(cyclic_gap, {"finetune": 10}, 30, parts=4)
        {'steps': 8, 'epochs': 2, 'finetune': 10}
        >>> fill_lengths(gmp, {}, 2000, parts=1)
        {'iterations': 2000, 'every': 50}
    """
    taken = inspect.signature(method).parameters
    if "iterations" in taken:
        return {"iterations": total, **often_enough(method, total)}
    check_counts(0, **{name: given[name] for name in ("steps", "epochs", "finetune") if name in given})
    if "steps" in taken:
        return _search(given, total, given.get("kappa", parts), branches)
    if "finetune" in taken:
        epochs = given.get("epochs", max(0, total - given.get("finetune", total - total // 2)))
        return {"epochs": epochs, "finetune": given.get("finetune", max(0, total - epochs))}
    return {"epochs": total} if "epochs" in taken else {}


def _search(given: Mapping[str, Any], total: int, parts: int, branches: int) -> dict[str, int]:
    """K steps of T epochs, then T' of fine-tuning: two rounds over all parts if there is time, else one."""
    of_round = max(1, parts // max(1, branches))
    rounds = ROUNDS if ROUNDS * of_round * branches <= SEARCH * total else 1
    steps = given.get("steps", rounds * of_round)
    search = total - given["finetune"] if "finetune" in given else round(SEARCH * total)
    epochs = given.get("epochs", max(1, search // max(1, steps * branches)))
    return {
        "steps": steps,
        "epochs": epochs,
        "finetune": given.get("finetune", max(0, total - steps * branches * epochs)),
    }


def often_enough(method: Callable[..., Plan], iterations: int) -> dict[str, int]:
    """Return the default `every` of a method, lowered if a short training would have too few edits."""
    every = inspect.signature(method).parameters.get("every")
    if every is None or not isinstance(every.default, int):
        return {}
    return {"every": max(1, min(every.default, iterations // LEAST_EDITS))}


def plan_length(plan: Plan, iterations_per_epoch: int) -> int:
    """Return the iterations of all phases of a plan, including all branches."""
    return sum(scheduled.phase.num_iterations(iterations_per_epoch) for scheduled in walk(plan))
