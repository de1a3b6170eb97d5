"""Choose the lengths of a method's phases so that they fill a given training. Standard library only.

Comparisons and trainers both use `fill_lengths` for the lengths that a user left out. It goes by what the method
declares, so a new method needs no change here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from growprune.plan.phases import Plan, declaration_of, walk
from growprune.plan.settings import check_counts

SEARCH, ROUNDS = 0.4, 2
"""The share of the training in which grow-and-prune searches, and how often it grows each part in that time."""
LEAST_EDITS = 40
"""The fewest edits in a training, for a method that edits every few iterations."""


def fill_lengths(
    method: Callable[..., Plan], given: Mapping[str, Any], total: int, *, parts: int, branches: int = 1
) -> dict[str, int]:
    """Return the lengths with which a method's phases fill a whole training; none if it declares no length.

    Args:
        given: the options that are already set. Lengths among them are kept; the others follow from them.
        total: the length of the training, in iterations for a method that counts those, else in epochs. If the given
            lengths exceed it, so do the returned ones.
        parts: the number of parts of the model.
        branches: the number of branches that each step trains. All of them count.

    Examples:
        >>> from growprune.methods import cyclic_gap, gmp
        >>> fill_lengths(cyclic_gap, {"finetune": 10}, 30, parts=4)
        {'steps': 8, 'epochs': 2, 'finetune': 10}
        >>> fill_lengths(gmp, {}, 2000, parts=1)
        {'iterations': 2000, 'every': 50}
    """
    about = declaration_of(method)
    if about.length is None:
        return {}
    if about.length == "iterations":
        filled = {"iterations": total}
        if about.every and isinstance(usual := about.options[about.every].default, int):
            filled[about.every] = max(1, min(usual, total // LEAST_EDITS))
        return filled
    check_counts(0, **{name: given[name] for name in ("steps", "epochs", "finetune") if name in given})
    if about.length == "epochs":
        return {"epochs": total}
    if about.length == "epochs + finetune":
        epochs = given.get("epochs", max(0, total - given.get("finetune", total - total // 2)))
        return {"epochs": epochs, "finetune": given.get("finetune", max(0, total - epochs))}
    # K steps of T epochs, then T' of fine-tuning: two rounds over all parts if there is time, else one
    of_round = max(1, (given.get(about.parts, parts) if about.parts else parts) // max(1, branches))
    rounds = ROUNDS if ROUNDS * of_round * branches <= SEARCH * total else 1
    steps = given.get("steps", rounds * of_round)
    search = total - given["finetune"] if "finetune" in given else round(SEARCH * total)
    epochs = given.get("epochs", max(1, search // max(1, steps * branches)))
    finetune = given.get("finetune", max(0, total - steps * branches * epochs))
    return {"steps": steps, "epochs": epochs, "finetune": finetune}


def plan_length(plan: Plan, iterations_per_epoch: int) -> int:
    """Return the iterations of all phases of a plan, including all branches."""
    return sum(scheduled.phase.num_iterations(iterations_per_epoch) for scheduled in walk(plan))
