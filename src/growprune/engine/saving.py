"""When a run's checkpoints are written, which of them stay, and how a run goes back to one."""

from __future__ import annotations

import time
from typing import Any

from growprune.engine import checkpoint
from growprune.engine.events import Events
from growprune.engine.folder import RunFolder
from growprune.plan import ScheduledPhase

State = dict[str, Any]


class Checkpoints:
    """The checkpoints of a run, and of the branches of the fork it is in.

    Args:
        seconds: the time from one to the next.
    """

    def __init__(self, folder: RunFolder, events: Events, seconds: float) -> None:
        self._folder, self._events, self._seconds = folder, events, seconds
        self._due = time.monotonic() + seconds
        self._number = max(checkpoint.numbers(folder.checkpoints), default=0)  # even if none of them can be loaded
        self._previous = 0

    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    def put_off(self) -> None:
        self._due = time.monotonic() + self._seconds

    def save(self, scheduled: ScheduledPhase, state: State, *, is_search_end: bool) -> None:
        """Write one of the run; the two newest stay, and the one from which a search can be extended."""
        folder = self._folder
        self._number += 1
        checkpoint.save(folder.checkpoints, self._number, state)
        self._events.log_event("checkpoint", scheduled, number=self._number)
        if is_search_end:
            checkpoint.write_json(folder.search_end, self._number)
        checkpoint.remove_old(folder.checkpoints, [self._previous, self._number, *folder.kept()])
        folder.remove_branches(before=scheduled.stage)
        self._previous = self._number

    def save_branch(self, scheduled: ScheduledPhase, state: State) -> None:
        assert scheduled.branch is not None
        folder = self._folder.branch(scheduled.stage, scheduled.branch)
        number = max(checkpoint.numbers(folder), default=0) + 1
        checkpoint.save(folder, number, state)
        self._events.log_event("checkpoint", scheduled, number=number)
        checkpoint.remove_old(folder, [number - 1, number])

    def load_branch(self, scheduled: ScheduledPhase) -> tuple[int, State] | None:
        """The number of a branch's newest whole checkpoint and what it holds, if there is one."""
        assert scheduled.branch is not None
        return checkpoint.load_newest(self._folder.branch(scheduled.stage, scheduled.branch), self._events.warn)

    def go_back_to(self, number: int, *, is_search_end: bool) -> None:
        """Count on from a checkpoint that was loaded."""
        if is_search_end:
            checkpoint.write_json(self._folder.search_end, number)
        self._number, self._previous = max(checkpoint.numbers(self._folder.checkpoints)), number
