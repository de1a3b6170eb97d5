"""Walking a plan: where a model stands in it, and what the branches of a fork bring together."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from growprune.plan import Action, By, Stretch
from growprune.snapshot import Snapshot

if TYPE_CHECKING:
    from growprune.sparse import SparseModel

Combine = Callable[[Snapshot, list[tuple[str, ...]], Snapshot], Snapshot]
"""Given the parts brought here, by branch the names each brings, and a copy of the model as it was when the fork began,
returns the parts of all branches."""


class Walk:
    """Where a model stands: edits of the stretch at `position`, and of all before it, are done."""

    def __init__(self) -> None:
        self.position = -1
        """The number of the stretch that is being trained; -1 before the first."""
        self.trail = ""
        """A digest of the stretches up to that one, so that no other plan is gone on with."""
        self.is_over = False
        self.base: Snapshot | None = None
        """The model as it was when the fork began that it is in."""
        self.brought: Snapshot = {}

    def along(
        self, listed: Sequence[Stretch], sparse: SparseModel, takes: Callable[[int], bool], combine: Combine
    ) -> Iterator[Stretch]:
        """Do the edits of each stretch, and hand it out; see `SparseModel.stretches`."""
        self._begin(listed)
        parts: list[tuple[str, ...]] = []
        for stretch in listed:
            parts = [] if stretch.branch in (None, 0) else parts
            parts += [stretch.brings.tensors] if stretch.brings is not None else []
            if stretch.index < self.position or self.is_over:
                continue
            is_mine = stretch.branch is None or takes(stretch.branch)
            if stretch.index > self.position:
                self._enter(stretch, sparse, is_mine=is_mine)
            if is_mine:
                yield stretch
            if stretch.brings is not None and is_mine:
                _prune_early(sparse, stretch, listed)
                self.brought |= sparse.snapshot(stretch.brings)
            if stretch.is_last_branch:  # every tensor comes from the branch that brings it
                assert self.base is not None
                sparse.restore(self.base | combine(self.brought, parts, self.base))  # what none brings is as it was
                self.base, self.brought = None, {}
        self.is_over = True

    def _begin(self, listed: Sequence[Stretch]) -> None:
        """Go on with the plan that was begun, or begin one."""
        trail = functools.reduce(_onward, listed[: self.position + 1], "")
        is_same = trail == self.trail and (self.position == len(listed) - 1 or not self.is_over)
        if self.is_over and not is_same:
            self.position, self.trail, self.is_over = -1, "", False
        elif not is_same or self.position >= len(listed):
            raise ValueError(
                f"the model is in stretch {self.position} of another plan: go on with that, or call leave_plan()"
            )

    def _enter(self, stretch: Stretch, sparse: SparseModel, *, is_mine: bool) -> None:
        if stretch.branch == 0:
            self.base, self.brought = sparse.snapshot(), {}
        elif stretch.branch is not None and is_mine:
            assert self.base is not None
            sparse.restore(self.base)
        if is_mine:
            sparse.apply(*stretch.phase.edits)
        else:  # so that later edits draw the same random numbers wherever the branch was trained
            for _ in stretch.phase.edits:
                sparse.count_edit()
        self.position, self.trail = stretch.index, _onward(self.trail, stretch)

    def state_dict(self) -> dict[str, Any]:
        place = {"position": self.position, "trail": self.trail, "is_over": self.is_over}
        return {**place, "base": self.base, "brought": dict(self.brought)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position, self.trail, self.is_over = state["position"], state["trail"], state["is_over"]
        self.base, self.brought = state["base"], dict(state["brought"])


def _onward(trail: str, stretch: Stretch) -> str:
    return hashlib.sha256(f"{trail}{stretch!r}".encode()).hexdigest()


def _prune_early(sparse: SparseModel, stretch: Stretch, listed: Sequence[Stretch]) -> None:
    """Prune a part where it was trained, as the plan does right after the fork, if that does not look at the others.

    The result is the same, but no more than one part is ever dense, and only what lives has to be sent.
    """
    assert stretch.brings is not None
    after = next((later for later in listed[stretch.index :] if later.step > stretch.step), None)
    edits = () if after is None or after.branch is not None else after.phase.edits
    if any(edit.action is not Action.PRUNE or edit.by is not By.MAGNITUDE for edit in edits):
        return
    for edit in edits:
        pools = sparse.pools(edit) if edit.to > 0 else []
        own = [pool for pool in pools if {weight.parameter for weight in pool.weights} <= set(stretch.brings.tensors)]
        sparse.fill(own, edit)
    sparse.enforce()
