"""What a sparsification method says: a plan, which is a repeatable listing of phases.

A *phase* is a few edits of the masks, then some training. There are two edits: `prune` a part,
and `grow` a part, to a sparsity or by a share of its live weights. A phase costs its edits and nothing else, so a
method may yield one every few iterations. A *fork* sends several machines off with the same model, each through a phase
of its own, and each returns one part. That is all a method may say.

A plan builds values and touches nothing, so it can be listed, printed, costed, tested, and resumed by skipping
what is done, with no model, no GPU and no torch.
"""

from growprune.plan.edits import (
    Action,
    By,
    Edit,
    InitialMask,
    Part,
    Parts,
    Spread,
    first_by,
    grow,
    parse_choice,
    prune,
)
from growprune.plan.phases import (
    Branch,
    Fork,
    Phase,
    Plan,
    Rule,
    ScheduledPhase,
    Stage,
    method,
    next_edits,
    prunes_after_fork,
    walk,
)

__all__ = [
    "Action",
    "Branch",
    "By",
    "Edit",
    "Fork",
    "InitialMask",
    "Part",
    "Parts",
    "Phase",
    "Plan",
    "Rule",
    "ScheduledPhase",
    "Spread",
    "Stage",
    "first_by",
    "grow",
    "method",
    "next_edits",
    "parse_choice",
    "prune",
    "prunes_after_fork",
    "walk",
]
