"""Walking a plan: where a model stands in it, and what the branches of a fork bring together."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from growprune.errors import GrowpruneError
from growprune.plan import Action, By, ScheduledPhase
from growprune.snapshot import Snapshot

if TYPE_CHECKING:
    from growprune.sparse import SparseModel

Combine = Callable[[Snapshot, list[tuple[str, ...]], Snapshot], Snapshot]
"""Given the parts brought here, by branch the names each brings, and a copy of the model as it was when the fork began,
returns the parts of all branches."""


class Walk:
    """Where a model stands: edits of the phase at `position`, and of all before it, are done."""

    def __init__(self) -> None:
        self.position = -1
        """The number of the phase that is being trained; -1 before the first."""
        self.trail = ""
        """A digest of the phases up to that one, so that no other plan is gone on with."""
        self.is_over = False
        self.base: Snapshot | None = None
        """The model as it was when the fork began that it is in."""
        self.returned: Snapshot = {}

    def along(
        self, listed: Sequence[ScheduledPhase], sparse: SparseModel, is_local: Callable[[int], bool], combine: Combine
    ) -> Iterator[ScheduledPhase]:
        """Do the edits of each phase, and hand it out; see `SparseModel.schedule`."""
        self._begin(listed)
        parts: list[tuple[str, ...]] = []
        for scheduled in listed:
            parts = [] if scheduled.branch in (None, 0) else parts
            parts += [scheduled.returns.tensors] if scheduled.returns is not None else []
            if scheduled.index < self.position or self.is_over:
                continue
            is_mine = scheduled.branch is None or is_local(scheduled.branch)
            if scheduled.index > self.position:
                self._enter(scheduled, sparse, is_mine=is_mine)
            if is_mine:
                yield scheduled
            if scheduled.returns is not None and is_mine:
                _prune_early(sparse, scheduled, listed)
                self.returned |= sparse.snapshot(scheduled.returns)
            if scheduled.is_last_branch:  # every tensor comes from the branch that brings it
                assert self.base is not None
                sparse.restore(self.base | combine(self.returned, parts, self.base))  # what none brings is as it was
                self.base, self.returned = None, {}
        self.is_over = True

    def _begin(self, listed: Sequence[ScheduledPhase]) -> None:
        """Go on with the plan that was begun, or begin one."""
        trail = functools.reduce(_onward, listed[: self.position + 1], "")
        is_same = trail == self.trail and (self.position == len(listed) - 1 or not self.is_over)
        if self.is_over and not is_same:
            self.position, self.trail, self.is_over = -1, "", False
        elif not is_same or self.position >= len(listed):
            raise GrowpruneError(
                f"the model is in phase {self.position} of another plan: go on with that, or call leave_plan()"
            )

    def _enter(self, scheduled: ScheduledPhase, sparse: SparseModel, *, is_mine: bool) -> None:
        if scheduled.branch == 0:
            self.base, self.returned = sparse.snapshot(), {}
        elif scheduled.branch is not None and is_mine:
            assert self.base is not None
            sparse.restore(self.base)
        if is_mine:
            sparse.apply(*scheduled.phase.edits)
        else:  # so that later edits draw the same random numbers wherever the branch was trained
            for _ in scheduled.phase.edits:
                sparse.count_edit()
        self.position, self.trail = scheduled.index, _onward(self.trail, scheduled)

    def state_dict(self) -> dict[str, Any]:
        place = {"position": self.position, "trail": self.trail, "is_over": self.is_over}
        return {**place, "base": self.base, "returned": dict(self.returned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position, self.trail, self.is_over = state["position"], state["trail"], state["is_over"]
        self.base, self.returned = state["base"], dict(state["returned"])


def _onward(trail: str, scheduled: ScheduledPhase) -> str:
    return hashlib.sha256(f"{trail}{scheduled!r}".encode()).hexdigest()


def _prune_early(sparse: SparseModel, scheduled: ScheduledPhase, listed: Sequence[ScheduledPhase]) -> None:
    """Prune a part where it was trained, as the plan does right after the fork, if that does not look at the others.

    The result is the same, but no more than one part is ever dense, and only what lives has to be sent.
    """
    assert scheduled.returns is not None
    after = next((later for later in listed[scheduled.index :] if later.stage > scheduled.stage), None)
    edits = () if after is None or after.branch is not None else after.phase.edits
    if any(edit.action is not Action.PRUNE or edit.by is not By.MAGNITUDE for edit in edits):
        return
    for edit in edits:
        pools = sparse.pools(edit) if edit.to > 0 else []
        own = [
            pool for pool in pools if {weight.parameter for weight in pool.weights} <= set(scheduled.returns.tensors)
        ]
        sparse.select(own, edit)
    sparse.enforce()
