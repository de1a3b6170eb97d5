"""The valid epochs of a run. Epochs that a kill undid, and that were trained again, count once."""

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
"""Prefixes of columns by group of an event: `layers` of a weight becomes `density/<weight>`."""


@dataclass(frozen=True)
class Row:
    """The numbers of one epoch."""

    stage: int
    branch: int | None
    iteration: int
    """Iteration of the run at the end of the epoch. Branches of a fork have the same ones."""
    time: float
    figures: dict[str, float | None]
    """Numbers by column: those of PLAIN, then others such as `validation/accuracy` and `density/stem.weight`."""

    @property
    def key(self) -> tuple[int, int | None, int]:
        return self.stage, self.branch, self.iteration


class StandingRows:
    """The valid rows of a run, from its events in order, including those of earlier processes.

    When a phase begins or is resumed at an iteration, rows beyond it are removed. Each branch of a fork is a line of
    training of its own, with checkpoints of its own.

    >>> rows = StandingRows()
    >>> for event in [
    ...     {"event": "epoch", "stage": 0, "branch": None, "iteration": 5, "epoch": 1, "loss": 3.0},
    ...     {"event": "epoch", "stage": 0, "branch": None, "iteration": 10, "epoch": 2, "loss": 2.0},
    ...     {"event": "resumed", "stage": 0, "branch": None, "iteration": 7},
    ... ]:
    ...     rows.take(event)
    >>> [row.iteration for row in rows]
    [5]
    """

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()) -> None:
        self._rows: dict[tuple[int, int | None, int], Row] = {}
        for event in events:
            self.take(event)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def take(self, event: Mapping[str, Any]) -> None:
        """Add the row of an epoch, or remove the rows that a phase or a resume undoes."""
        stage, branch, iteration = event.get("stage"), event.get("branch"), event.get("iteration")
        if event["event"] in ("phase", "resumed") and iteration is not None:
            for key in [*self._rows]:
                is_same_line = key[1] is None if branch is None else key[:2] == (stage, branch)
                if is_same_line and key[2] > iteration:
                    del self._rows[key]
        if event["event"] == "epoch" and iteration is not None:
            key = event["stage"], branch, iteration
            self._rows.pop(key, None)
            figures = {name: event.get(name) for name in PLAIN}
            for group, prefix in GROUPS.items():
                figures |= {f"{prefix}/{name}": value for name, value in (event.get(group) or {}).items()}
            self._rows[key] = Row(*key, event.get("time") or time.time(), figures)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Read the events of all processes of a run, sorted by time. Lines cut short by a kill are skipped."""
    events = []
    for log in sorted(folder.glob("log*.jsonl")):
        for line in log.read_bytes().splitlines() if log.is_file() else ():
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict) and isinstance(event.get("event"), str):
                    events.append(event | {"time": float(event.get("time") or 0)})
    return sorted(events, key=lambda event: float(event["time"]))  # which keeps the order of equal times
