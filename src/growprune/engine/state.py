"""The place of a run in its plan, and what it resumes from, in its checkpoints and in those of a fork's branches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from growprune.engine.observers import Accounting, Best, Exploration
from growprune.engine.trainer import Training
from growprune.errors import GrowpruneError
from growprune.masks.bits import Snapshot
from growprune.masks.layers import dense_shape
from growprune.plan import Action, Edit, ScheduledPhase
from growprune.sparse.cursor import Cursor
from growprune.sparse.model import SparseModel
from growprune.sparse.rng import rng_state, set_rng_state


class Place(Cursor):
    """The place of a run in a plan, which may have forks. The loop moves it by phases and by iterations.

    The branches of a fork follow one another, and iterations count those that are trained elsewhere too.
    """

    takes_forks = True

    @property
    def done(self) -> int:
        """Number of finished iterations of the current phase."""
        return self.iteration - self.start

    def enter(self, scheduled: ScheduledPhase) -> None:
        """Begin a phase with its edits."""
        self._begin_counting()
        self.start = self.iteration
        self._enter(scheduled)
        if self.left:
            self._watch()

    def count(self) -> None:
        """Count a finished iteration."""
        self.iteration += 1
        if self.left:
            self._watch()

    def skip(self, scheduled: ScheduledPhase) -> None:
        """Pass over a branch that is trained elsewhere."""
        self.sparse.skip(len(scheduled.phase.edits))
        self._place_at(scheduled)
        self.start = self.iteration
        self.iteration += self.length_of(scheduled.phase)


def prunes_after_fork(scheduled: ScheduledPhase, schedule: Sequence[ScheduledPhase]) -> tuple[Edit, ...]:
    """Return the prunes right after a branch's fork, if nothing else happens there.

    A machine may then prune the part that it trained before the merge, with the same result. This holds as long as no
    other part is ranked with it. With one ranking of the whole model, parts are pruned after the merge.
    """
    later = (schedule[index] for index in range(scheduled.index + 1, len(schedule)))
    after = next((phase for phase in later if phase.stage > scheduled.stage), None)
    edits = () if after is None or after.branch is not None else after.phase.edits
    is_plain = all(e.action is Action.PRUNE and e.is_usual and e.to is not None for e in edits)
    return edits if is_plain else ()


def returned_by(scheduled: ScheduledPhase, schedule: Sequence[ScheduledPhase], sparse: SparseModel) -> Snapshot:
    """Return the part that a branch has trained, pruned already where that is possible.

    No more than one part is ever dense then, and only live weights have to be sent.
    """
    assert scheduled.returns is not None
    edits, names = prunes_after_fork(scheduled, schedule), set(scheduled.returns.tensors)
    for edit in edits:
        pools = sparse.editor.pools(edit) if edit.to else []
        sparse.editor.select([pool for pool in pools if {w.parameter for w in pool.weights} <= names], edit)
    if edits:
        sparse.enforce()
    return sparse.snapshot(scheduled.returns)


@dataclass
class RunState:
    """Everything that a run resumes from, and nothing else.

    The checkpoint of a branch has no history, best model and explored weights: those are the run's. To resume a branch,
    the run returns to the start of the fork and enters the branch again.
    """

    sparse: SparseModel
    place: Place
    training: Training
    accounting: Accounting
    exploration: Exploration
    best: Best
    history: list[dict[str, Any]] = field(default_factory=list)
    """One row per epoch. Rows of a branch are in `branch_rows` until the fork is merged."""
    branch_rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    """Time that the run took so far."""

    def state_dict(self, device: str | None = None) -> dict[str, Any]:
        """Return the state between two iterations, or at the end of a phase.

        Args:
            device: of the optimizer's state and the tensors of a sharded model; "meta" for a process that keeps none.
        """
        state = {
            "tensors": tensors_of(self.sparse),
            "model": self.sparse.snapshot(device=device or "cpu"),
            "sparse": self.sparse.state_dict(),
            "place": self.place.state_dict(),
            "training": self.training.state_dict(device),
            "accounting": self.accounting.state_dict(),
            "rng": rng_state(),
        }
        if self.is_in_branch:
            return {**state, "branch_rows": self.branch_rows}
        of_run = {"best": self.best.state_dict(), "exploration": self.exploration.state_dict()}
        return {**state, **of_run, "history": self.history, "seconds": self.seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_same_tensors(self.sparse, state["tensors"])
        self.sparse.restore(state["model"])
        self.sparse.load_state_dict(state["sparse"])
        self.place.load_state_dict(state["place"])
        self.training.load_state_dict(state["training"])
        self.accounting.load_state_dict(state["accounting"])
        if self.is_in_branch:
            self.branch_rows = state["branch_rows"]
        else:
            self.best.load_state_dict(state["best"])
            self.exploration.load_state_dict(state["exploration"])
            self.history, self.seconds = state["history"], state["seconds"]
        set_rng_state(state["rng"])

    @property
    def is_in_branch(self) -> bool:
        return self.place.current is not None and self.place.current.branch is not None


def tensors_of(sparse: SparseModel) -> dict[str, str]:
    """Kind, dtype and shape of every parameter and buffer, such as "prunable float32 (2, 4)", for any storage."""
    prunable, found = {weight.parameter for weight in sparse.weights}, {}
    for name, parameter in sparse.model.named_parameters():
        path, _, local = name.rpartition(".")
        shape = dense_shape(sparse.model.get_submodule(path), local)
        found[name] = f"{'prunable ' if name in prunable else ''}{parameter.dtype} {shape}"
    found |= {name: f"{buffer.dtype} {tuple(buffer.shape)}" for name, buffer in sparse.model.named_buffers()}
    return {name: what.replace("torch.", "") for name, what in found.items()}


def check_same_tensors(sparse: SparseModel, stored: Mapping[str, str]) -> None:
    """Raise if a model has other tensors than a checkpoint. The error names the first that differs."""
    found = tensors_of(sparse)
    for name in {**found, **stored}:
        if found.get(name) != stored.get(name):
            raise GrowpruneError(
                f"the model differs from the one in the checkpoint: {name} is {found.get(name, 'missing')} now, and "
                f"{stored.get(name, 'missing')} in the checkpoint. Restore the code of the model, or start a new run"
            )
