"""The epochs of a run that stand: those that a kill took back, and that were trained again, count once."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLAIN = ("epoch", "iteration", "stage", "branch", "loss", "lr", "alive", "density", "explored", "churn")
GROUPS = {"validation": "validation", "candidate": "candidate", "rule": "rule", "layers": "density"}
"""Figures by name, in an event and in a row: `layers` of a weight becomes `density/<weight>`."""


@dataclass(frozen=True)
class Row:
    """One epoch."""

    stage: int
    branch: int | None
    iteration: int
    """Of the run, at the end of the epoch; the branches of a fork have the same ones."""
    time: float
    figures: dict[str, float | None]
    """By column: those of PLAIN, then such as `validation/accuracy` and `density/stem.weight`."""


class StandingRows:
    """Rows by the events of a run, told in order, those of its earlier processes too.

    A phase begins, or is gone on with, at an iteration: what was trained beyond it before is taken back. The branches
    of a fork are each a line of their own, with checkpoints of their own.

    >>> rows = StandingRows()
    >>> for event in [
    ...     {"event": "epoch", "stage": 0, "branch": None, "iteration": 5, "epoch": 1, "loss": 3.0},
    ...     {"event": "epoch", "stage": 0, "branch": None, "iteration": 10, "epoch": 2, "loss": 2.0},
    ...     {"event": "resumed", "stage": 0, "branch": None, "iteration": 7},
    ... ]:
    ...     _ = rows.take(event)
    >>> [row.iteration for row in rows]
    [5]
    """

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()) -> None:
        self._rows: dict[tuple[int, int | None, int], Row] = {}
        self.is_stale = True
        """Whether rows were taken back since they were written; who writes them sets it to False."""
        for event in events:
            self.take(event)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def take(self, event: Mapping[str, Any]) -> Row | None:
        """Hear of an event; gives the row that it adds, if it does."""
        if event["event"] in ("phase", "resumed") and event.get("iteration") is not None:
            self._go_back(event.get("stage"), event.get("branch"), event["iteration"])
        if event["event"] != "epoch" or "iteration" not in event:
            return None
        key = event["stage"], event["branch"], event["iteration"]
        self.is_stale |= self._rows.pop(key, None) is not None
        self._rows[key] = Row(*key, event.get("time") or time.time(), dict(_figures(event)))
        return self._rows[key]

    def _go_back(self, stage: int | None, branch: int | None, iteration: int) -> None:
        """Take back what the same line of training has beyond an iteration."""
        for key in [*self._rows]:
            is_same_line = key[1] is None if branch is None else key[:2] == (stage, branch)
            if is_same_line and key[2] > iteration:
                del self._rows[key]
                self.is_stale = True


def _figures(event: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    yield from ((name, event.get(name)) for name in PLAIN)
    for group, prefix in GROUPS.items():
        yield from ((f"{prefix}/{name}", value) for name, value in (event.get(group) or {}).items())


def read_events(folder: Path) -> list[dict[str, Any]]:
    """What all processes of a run have logged so far, in the order of time; a line that a kill cut short is skipped."""
    events = []
    for log in sorted(folder.glob("log*.jsonl")):
        for line in log.read_bytes().splitlines():
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict) and isinstance(event.get("event"), str):
                    events.append(event | {"time": float(event.get("time") or 0)})
    return sorted(events, key=lambda event: float(event["time"]))  # which keeps the order of equal times
