"""Events of a run: what its log says, and what listeners such as the progress display see."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from growprune.engine.mesh import PeerFailed
from growprune.engine.trainer import TrainingDiverged
from growprune.errors import GrowpruneError, shorten
from growprune.plan import ScheduledPhase

if TYPE_CHECKING:
    from growprune.engine.folder import RunFolder

Event: TypeAlias = dict[str, Any]
Listener: TypeAlias = Callable[[Event], None]


class Events:
    """Sends events to listeners. Events are either *logged* in the run folder too, or only *shown*."""

    def __init__(self, folder: RunFolder, listeners: Sequence[Listener], last: int) -> None:
        self._folder, self._listeners, self._last = folder, listeners, last

    def log_event(self, event: str, scheduled: ScheduledPhase | None = None, **details: Any) -> None:
        self._folder.append(self.show(event, scheduled, **details))

    def show(self, event: str, scheduled: ScheduledPhase | None = None, **details: Any) -> Event:
        """Send an event to listeners without logging it."""
        entry: Event = {"event": event}
        if scheduled is not None:
            entry |= {
                "index": scheduled.index,
                "last": self._last,
                "stage": scheduled.stage,
                "branch": scheduled.branch,
            }
        entry |= details
        for listener in self._listeners:
            listener(entry)
        return entry

    def warn(self, message: str) -> None:
        self.log_event("warning", message=message)

    def log_failure(self, error: BaseException) -> None:
        """Log why the run ends, for readers of the folder: as interrupted by Ctrl-C, or as failed."""
        entry: Event = {"event": "interrupted"}
        if not isinstance(error, KeyboardInterrupt):
            entry = {"event": "failed", "message": last_line(error)}
        for tell in (self._folder.append, *self._listeners):
            with contextlib.suppress(Exception):  # the disk may be full, or a listener may be what failed
                tell(entry)


def last_line(error: BaseException) -> str:
    """The message of an error of ours, or the last line of its traceback."""
    says_all = isinstance(error, GrowpruneError | TrainingDiverged | PeerFailed)
    text = str(error) if says_all else traceback.format_exception_only(error)[-1]
    return shorten(" ".join(text.split()), 1000)
