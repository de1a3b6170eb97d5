"""A cursor for plans with forks, such as P-GaP's, in which several machines train branches of the same model.

The branches of a fork follow one another, and those that are trained elsewhere count too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from growprune.masks.bits import Snapshot
from growprune.plan import Action, Edit, ScheduledPhase
from growprune.plan.settings import check_state
from growprune.sparse.cursor import Cursor

Combine = Callable[[Snapshot, list[tuple[str, ...]], Snapshot], Snapshot]
"""(the parts returned by this process, the names that each branch returns, a copy of the model before the fork) ->
the parts of all branches."""


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


class ForkCursor(Cursor):
    """A cursor whose plan may have forks.

    Args:
        is_local: which branches of a fork are trained in this process; the others are trained elsewhere.
        combine: collects the parts of all branches.
        others: further arguments of `Cursor`.
    """

    takes_forks = True

    def __init__(
        self,
        *args: Any,
        is_local: Callable[[int], bool] = lambda branch: True,
        combine: Combine = lambda returned, parts, like: returned,
        **others: Any,
    ) -> None:
        super().__init__(*args, **others)
        self._is_local, self._combine = is_local, combine
        self._base: Snapshot | None = None
        """The model at the beginning of the current fork."""
        self._returned: Snapshot = {}

    def _enter_next(self, start: int | None = None) -> ScheduledPhase | None:
        """Leave the current phase and enter the next that is trained here; None if there is none."""
        if self.current is not None:
            self._leave(self.current)
        while self.position + 1 < len(self.schedule):
            scheduled = self.schedule[self.position + 1]
            if scheduled.branch is not None and self._base is None:
                self._base, self._returned = self.sparse.snapshot(), {}
            elif scheduled.branch is not None and self._is_local(scheduled.branch):
                assert self._base is not None
                self.sparse.restore(self._base)
            if scheduled.branch is None or self._is_local(scheduled.branch):
                break
            # a branch that is trained elsewhere
            self.sparse.skip(scheduled.phase.edits)
            self._place_at(scheduled)
            self._end_fork_after(scheduled)
            if start is not None:
                self.iteration += self.length_of(scheduled.phase)
                start += self.length_of(scheduled.phase)
        return self._enter_following(start)

    def _enter(self, scheduled: ScheduledPhase) -> None:
        was_in_branch = self.position >= 0 and self.schedule[self.position].branch is not None
        super()._enter(scheduled)
        self._is_fresh |= was_in_branch or scheduled.branch is not None

    def _leave(self, scheduled: ScheduledPhase) -> None:
        super()._leave(scheduled)
        if scheduled.returns is not None:
            # no more than one part is ever dense then, and only live weights have to be sent
            edits, names = prunes_after_fork(scheduled, self.schedule), set(scheduled.returns.tensors)
            editor = self.sparse.editor
            for edit in edits:
                pools = editor.pools(edit) if edit.to else []
                editor.select([pool for pool in pools if {w.parameter for w in pool.weights} <= names], edit)
            if edits:
                self.sparse.enforce()
            self._returned |= self.sparse.snapshot(scheduled.returns)
            self._end_fork_after(scheduled)

    def _end_fork_after(self, scheduled: ScheduledPhase) -> None:
        if not scheduled.is_last_branch:
            return
        assert self._base is not None
        same = self.schedule[scheduled.index - (scheduled.branch or 0) : scheduled.index + 1]
        parts = [s.returns.tensors for s in same if s.returns is not None]
        # every tensor comes from the branch that returns it, and what none returns is as it was
        self.sparse.restore(self._base | self._combine(self._returned, parts, self._base))
        self._base, self._returned = None, {}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "base": self._base, "returned": dict(self._returned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, "base", "returned")
        super().load_state_dict(state)
        self._base, self._returned = state["base"], dict(state["returned"])
