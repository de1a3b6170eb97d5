"""The checkpoints of a run: their content, and when they are removed.

Checkpoints of the run and of branches hold the model in training. The place in the plan, the history and the best model
are only in checkpoints of the run: to resume a branch, the run returns to the start of the fork and enters it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from growprune.engine.compatibility import check_same_tensors, tensors_of
from growprune.engine.events import Events, Timer
from growprune.engine.folder import RunFolder
from growprune.files.checkpoint import load_newest, numbers, remove_old, save
from growprune.plan import ScheduledPhase
from growprune.sparse.rng import rng_state, set_rng_state

if TYPE_CHECKING:
    from growprune.engine.run import Run

State = dict[str, Any]


class Checkpoints:
    """The checkpoints of a run, and of the branches of the fork it is in.

    Args:
        seconds: time between checkpoints.
    """

    def __init__(self, folder: RunFolder, events: Events, seconds: float) -> None:
        self._folder, self._events = folder, events
        self.timer = Timer(seconds)
        """Says when the next checkpoint is due."""
        self.timer.put_off()
        self._number = max(numbers(folder.checkpoints), default=0)  # even if none of them can be loaded
        self._previous = 0

    def save(self, scheduled: ScheduledPhase, state: State) -> None:
        """Write a checkpoint of the run, and keep the two newest."""
        folder = self._folder
        self._number += 1
        save(folder.checkpoints, self._number, state)
        self._events.log_event("checkpoint", scheduled, number=self._number)
        remove_old(folder.checkpoints, [self._previous, self._number])
        folder.remove_branches(before=scheduled.stage)
        self._previous = self._number

    def save_branch(self, scheduled: ScheduledPhase, state: State) -> None:
        assert scheduled.branch is not None
        folder = self._folder.branch(scheduled.stage, scheduled.branch)
        number = max(numbers(folder), default=0) + 1
        save(folder, number, state)
        self._events.log_event("checkpoint", scheduled, number=number)
        remove_old(folder, [number - 1, number])

    def load_branch(self, scheduled: ScheduledPhase) -> tuple[int, State] | None:
        """Number and content of the newest complete checkpoint of a branch, if there is one."""
        assert scheduled.branch is not None
        return load_newest(self._folder.branch(scheduled.stage, scheduled.branch), self._events.warn)

    def go_back_to(self, number: int) -> None:
        """Continue numbering from a loaded checkpoint."""
        self._number, self._previous = max(numbers(self._folder.checkpoints)), number


def run_state(run: Run) -> State:
    """The full state of a run, to resume it between two iterations or at the end of a phase."""
    return {
        **_trained_state(run),
        "sparse": run.sparse.state_dict(),
        "cursor": run.cursor.state_dict(),
        "history": run.history,
        "best": run.best.state_dict(),
        "exploration": run.exploration.state_dict(),
    }


def branch_state(run: Run) -> State:
    """The full state of the current branch, to resume it."""
    rule = {} if run.cursor.rule is None else run.cursor.rule.state_dict()
    return {**_trained_state(run), "branch_rows": run.branch_rows, "rule": rule}


def _trained_state(run: Run) -> State:
    device = "cpu" if run.mesh.leads_group else "meta"  # who only takes part keeps nothing of it
    return {
        "tensors": tensors_of(run.sparse),
        "model": run.sparse.snapshot(device=device),
        "training": run.training.state_dict(device if run.is_sharded else None),
        "accounting": run.accounting.state_dict(),
        "rng": rng_state(),
        "seconds": run.seconds,
        "done": run.done,
    }


def load_run_state(run: Run, state: State) -> None:
    """Load a state made by `run_state`."""
    check_same_tensors(run.sparse, state["tensors"])
    run.sparse.restore(state["model"])
    run.sparse.load_state_dict(state["sparse"])
    run.cursor.load_state_dict(state["cursor"])
    run.training.load_state_dict(state["training"])
    run.accounting.load_state_dict(state["accounting"])
    run.best.load_state_dict(state["best"])
    run.exploration.load_state_dict(state["exploration"])
    run.history, run.seconds = state["history"], state["seconds"]
    set_rng_state(state["rng"])


def load_branch_state(run: Run, state: State) -> None:
    """Load a state made by `branch_state`, in a run that has just entered the branch."""
    check_same_tensors(run.sparse, state["tensors"])
    run.sparse.restore(state["model"])
    run.training.load_state_dict(state["training"])
    if run.cursor.rule is not None:
        run.cursor.rule.load_state_dict(state["rule"])
    run.accounting.load_state_dict(state["accounting"], is_branch=True)
    run.branch_rows = state["branch_rows"]
    run.cursor.skip_to(state["done"])
    set_rng_state(state["rng"])
