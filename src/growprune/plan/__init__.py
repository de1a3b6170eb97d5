"""Plans: the phases of a sparsification method, as values that can be listed any number of times.

A *phase* is a few edits of the masks, then some training. There are two edits: `prune` a part and `grow` a part. Each
goes to a sparsity, or by a share of the part's live weights. A phase costs only its edits, so a method may yield one
every few iterations. In a *fork*, several machines start from the same model. Each trains its own phase and returns one
part. A method consists of nothing else.

A plan builds values and changes nothing. It can be listed, printed, costed and tested without a model, a GPU or torch.
Resuming skips the phases that are done.
"""

from growprune.plan.phases import (
    Action,
    Branch,
    By,
    Declaration,
    Edit,
    Fork,
    InitialMask,
    Part,
    Parts,
    Phase,
    Plan,
    Rule,
    ScheduledPhase,
    Score,
    Spread,
    Stage,
    declaration_of,
    first_by,
    grow,
    method,
    next_edits,
    parse_choice,
    prune,
    walk,
)

__all__ = [
    "Action",
    "Branch",
    "By",
    "Declaration",
    "Edit",
    "Fork",
    "InitialMask",
    "Part",
    "Parts",
    "Phase",
    "Plan",
    "Rule",
    "ScheduledPhase",
    "Score",
    "Spread",
    "Stage",
    "declaration_of",
    "first_by",
    "grow",
    "method",
    "next_edits",
    "parse_choice",
    "prune",
    "walk",
]
