"""What the checkpoints of a run, and of the branches of a fork, hold, and how a run takes it back.

Both hold the model as it is trained. Where the run stands in its plan, its history and its best model are in those of
the run only: a branch is gone on with when the run, taken back to before the fork, enters it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from growprune.engine.compatibility import check_same_tensors, tensors_of
from growprune.engine.rng import rng_state, set_rng_state
from growprune.sparse.internals import internals

if TYPE_CHECKING:
    from growprune.engine.run import Run

State = dict[str, Any]


def run_state(run: Run) -> State:
    """All that a run needs to go on between two iterations, or where a phase is over."""
    return {
        **_trained_state(run),
        "sparse": run.sparse.state_dict(),
        "cursor": run.cursor.state_dict(),
        "history": run.history,
        "best": run.best.state_dict(),
        "exploration": run.exploration.state_dict(),
    }


def branch_state(run: Run) -> State:
    """All that the branch needs to go on that a run is in."""
    rule = {} if run.cursor.rule is None else run.cursor.rule.state_dict()
    return {**_trained_state(run), "branch_rows": run.branch_rows, "rule": rule}


def _trained_state(run: Run) -> State:
    device = "cpu" if run.mesh.leads_group else "meta"  # who only takes part keeps nothing of it
    return {
        "tensors": tensors_of(run.sparse),
        "model": internals(run.sparse).snapshot(device=device),
        "training": run.training.state_dict(device if run.is_sharded else None),
        "accounting": run.accounting.state_dict(),
        "rng": rng_state(),
        "seconds": run.seconds,
        "done": run.done,
    }


def load_run_state(run: Run, state: State) -> None:
    """Take back what `run_state` gave."""
    check_same_tensors(run.sparse, state["tensors"])
    internals(run.sparse).restore(state["model"])
    run.sparse.load_state_dict(state["sparse"])
    run.cursor.load_state_dict(state["cursor"])
    run.training.load_state_dict(state["training"])
    run.accounting.load_state_dict(state.get("accounting"))
    run.best.load_state_dict(state["best"])
    run.exploration.load_state_dict(state.get("exploration", {}))
    run.history, run.seconds = state["history"], state["seconds"]
    set_rng_state(state["rng"])


def load_branch_state(run: Run, state: State) -> None:
    """Take back what `branch_state` gave, in a run that has just entered the branch."""
    check_same_tensors(run.sparse, state["tensors"])
    internals(run.sparse).restore(state["model"])
    run.training.load_state_dict(state["training"])
    if run.cursor.rule is not None:
        run.cursor.rule.load_state_dict(state["rule"])
    run.accounting.load_state_dict(state.get("accounting"), is_branch=True)
    run.branch_rows = state["branch_rows"]
    run.cursor.skip_to(state["done"])
    set_rng_state(state["rng"])
