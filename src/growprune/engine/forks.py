"""The place of a run in its plan, and what a branch of a fork returns."""

from __future__ import annotations

from collections.abc import Sequence

from growprune.masks.bits import Snapshot
from growprune.plan import Action, Edit, ScheduledPhase
from growprune.sparse.cursor import Cursor
from growprune.sparse.model import SparseModel


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
        self.sparse.skip(scheduled.phase.edits)
        self._place_at(scheduled)
        self.start = self.iteration
        self.iteration += self.length_of(scheduled.phase)

    def end(self) -> None:
        """Leave the last phase."""
        self.is_over = True
        self.sparse.set_rule(None)
        self.sparse.watch(())


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
