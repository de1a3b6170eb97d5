"""What happens in a run, told to whoever listens: the log, the console, and others."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from growprune.plan import ScheduledPhase

Event: TypeAlias = dict[str, Any]
Listener: TypeAlias = Callable[[Event], None]

SHOW_SECONDS, LOOK_SECONDS = 0.2, 1.0
"""How often iterations are shown, and the logs of other processes looked at."""


class Timer:
    """Tells when some seconds are over; at once, the first time, unless it was put off."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._due = seconds, 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    def put_off(self) -> None:
        self._due = time.monotonic() + self._seconds


class Events:
    """Tells listeners. What is *logged* goes to all of them; what is only *shown* to those who show it.

    Args:
        log: keeps every event that is logged.
        listeners: are told of what is logged and of what is shown.
    """

    def __init__(self, log: Listener, listeners: Sequence[Listener], last: int) -> None:
        self._log, self._listeners, self._last = log, listeners, last
        self.show_timer, self.look_timer = Timer(SHOW_SECONDS), Timer(LOOK_SECONDS)

    def log_event(self, event: str, scheduled: ScheduledPhase | None = None, **details: Any) -> None:
        self._log(self.show(event, scheduled, **details))

    def show(self, event: str, scheduled: ScheduledPhase | None = None, **details: Any) -> Event:
        """Tell an event without logging it."""
        entry: Event = {"event": event} | ({} if scheduled is None else self._place(scheduled)) | details
        for listener in self._listeners:
            listener(entry)
        return entry

    def warn(self, message: str) -> None:
        self.log_event("warning", message=message)

    def _place(self, scheduled: ScheduledPhase) -> Event:
        return {"index": scheduled.index, "last": self._last, "stage": scheduled.stage, "branch": scheduled.branch}


class OtherLogs:
    """What other processes of a run have logged since one last looked.

    Args:
        logs: the log of each, by its rank.
    """

    def __init__(self, logs: Mapping[int, Path]) -> None:
        self._read = {rank: (log, log.stat().st_size if log.exists() else 0) for rank, log in logs.items()}

    def news(self) -> Iterator[Event]:
        """Their new events, each with the rank that logged it."""
        for rank, (log, start) in self._read.items():
            new = b""
            with contextlib.suppress(FileNotFoundError), log.open("rb") as lines:  # it has nothing to say yet
                lines.seek(start)
                new = lines.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[rank] = log, start + len(whole)
            for line in whole.splitlines():
                with contextlib.suppress(ValueError, RecursionError, TypeError):  # a line that a kill cut short
                    yield {**json.loads(line), "rank": rank}
