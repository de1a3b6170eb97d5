"""Events of a run, and their listeners: the log, the console and others."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from growprune.files.atomic import plain_file
from growprune.plan import ScheduledPhase

Event: TypeAlias = dict[str, Any]
Listener: TypeAlias = Callable[[Event], None]

SHOW_SECONDS, LOOK_SECONDS = 0.2, 1.0
"""Seconds between updates of the display, and between reads of the logs of other processes."""


class Timer:
    """`is_due` becomes True some seconds after `put_off`, and is True at first."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._due = seconds, 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    def put_off(self) -> None:
        self._due = time.monotonic() + self._seconds


class Events:
    """Sends events to listeners. Events are either *logged*, or only *shown*.

    Args:
        log: receives logged events.
        listeners: receive logged and shown events.
    """

    def __init__(self, log: Listener, listeners: Sequence[Listener], last: int) -> None:
        self._log, self._listeners, self._last = log, listeners, last
        self.show_timer, self.look_timer = Timer(SHOW_SECONDS), Timer(LOOK_SECONDS)

    def log_event(self, event: str, scheduled: ScheduledPhase | None = None, **details: Any) -> None:
        self._log(self.show(event, scheduled, **details))

    def show(self, event: str, scheduled: ScheduledPhase | None = None, **details: Any) -> Event:
        """Send an event to listeners without logging it."""
        entry: Event = {"event": event} | ({} if scheduled is None else self._place(scheduled)) | details
        for listener in self._listeners:
            listener(entry)
        return entry

    def warn(self, message: str) -> None:
        self.log_event("warning", message=message)

    def _place(self, scheduled: ScheduledPhase) -> Event:
        return {"index": scheduled.index, "last": self._last, "stage": scheduled.stage, "branch": scheduled.branch}


class OtherLogs:
    """New events in the logs of other processes of a run.

    Args:
        logs: the log of each process, by rank.
    """

    def __init__(self, logs: Mapping[int, Path]) -> None:
        self._read = {rank: (log, log.stat().st_size if log.exists() else 0) for rank, log in logs.items()}

    def news(self) -> Iterator[Event]:
        """The new events, each with the rank that logged it."""
        for rank, (log, start) in self._read.items():
            new = b""
            with (
                contextlib.suppress(FileNotFoundError),
                plain_file(log).open("rb") as lines,
            ):  # it has nothing to say yet
                lines.seek(start)
                new = lines.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[rank] = log, start + len(whole)
            for line in whole.splitlines():
                with contextlib.suppress(ValueError, RecursionError, TypeError):  # a line that a kill cut short
                    yield {**json.loads(line), "rank": rank}
