"""What a run writes for people to look at, beside its own log: `metrics.csv`, and TensorBoard's files.

    metrics.csv     a row an epoch
    tensorboard/    the same as curves; the branches of a fork lie below it, in branch-0, branch-1, ...

A run that was killed goes on from its newest checkpoint, and trains some epochs again. What is written has them once:
all of it is made from the events in the run's own log, of which those that a kill took back do not count (rows.py). So
a log can also be asked for when a run is resumed, and has its beginning too.

Of an epoch there are: loss, lr, the metrics of validation data, live weights (`alive`), their share of the prunable
ones (`density`, and `density/<layer>`), `explored` and `churn` (see engine/accounting.py), and what a rule tells.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from growprune.errors import GrowpruneError
from growprune.logs.rows import Row, StandingRows, read_events

LOGS = {"csv": "growprune.logs.csv_log", "tensorboard": "growprune.logs.tensorboard_log"}
"""Where the Writer of each kind of log is; loaded when it is asked for."""

ENDS = ("finished", "interrupted", "failed")


class Writer(Protocol):
    """Writes one kind of log into the folder of a run; made with the folder, which need not be there yet."""

    def rewrite(self, rows: Iterable[Row]) -> None:
        """Write all rows anew; what was there before is gone."""

    def append(self, row: Row) -> None: ...

    def close(self) -> None:
        """See to it that all is on disk. More may be appended later."""


class Logs:
    """A listener of a run that keeps logs in its folder.

    Args:
        names: which, as in LOGS.
    """

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        check_names(names)
        self._folder = folder
        self._writers: list[Writer] = [importlib.import_module(LOGS[name]).Writer(folder) for name in names]
        self._rows: StandingRows | None = None

    def __call__(self, event: Mapping[str, Any]) -> None:
        if not self._writers:
            return
        if self._rows is None:
            self._rows = StandingRows(read_events(self._folder))
        row = self._rows.take(event)
        if row is not None or (event["event"] in ENDS and self._rows.is_stale):
            self._write(self._rows, row)
        if event["event"] in ENDS:
            for writer in self._writers:
                writer.close()

    def _write(self, rows: StandingRows, row: Row | None) -> None:
        for writer in self._writers:
            if rows.is_stale:
                writer.rewrite(rows)
            elif row is not None:
                writer.append(row)
        rows.is_stale = False


def check_names(names: Sequence[str]) -> None:
    """Raise unless there are such logs."""
    for name in names:
        if name not in LOGS:
            raise GrowpruneError(f"there is no log {name!r}; known are {', '.join(LOGS)}")
    if len({*names}) < len(names):
        raise GrowpruneError(f"log is {', '.join(names)}: name each one once")
