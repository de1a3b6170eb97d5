"""Logs of a run for users: `metrics.csv` and TensorBoard.

    metrics.csv     one row per epoch
    tensorboard/    the same as curves; branches of a fork are in branch-0, branch-1, ...

A killed run resumes from its newest checkpoint, and trains some epochs again. The logs have each epoch once, because
they are made from the run's own log without the epochs that a kill undid (rows.py). So a log can also be added when a
run is resumed, and is complete from the start.

An epoch has: loss, lr, the validation metrics, live weights (`alive`), their fraction of the prunable ones (`density`
and `density/<layer>`), `explored` and `churn` (see engine/observers.py), and the values that a rule reports.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from growprune.errors import GrowpruneError
from growprune.logs.rows import Row, StandingRows, read_events

LOGS = ("csv", "tensorboard")
"""The log formats. The Writer of each is in a module of that name with `_log`, which is loaded on first use."""

ENDS = ("finished", "interrupted", "failed")


class Writer(Protocol):
    """Writes one log format into a run folder. The folder need not exist yet."""

    def write(self, rows: Sequence[Row]) -> None:
        """Write all rows. Most were written before; some of those may be gone."""

    def close(self) -> None:
        """Flush everything to disk. More rows may be written later."""


class Logs:
    """A listener that writes the logs of a run into its folder.

    Args:
        names: log formats, as in LOGS.
    """

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._folder = folder
        modules = [importlib.import_module(f"growprune.logs.{name}_log") for name in names]
        self._writers: list[Writer] = [module.Writer(folder) for module in modules]
        self._rows: StandingRows | None = None

    def __call__(self, event: Mapping[str, Any]) -> None:
        if self._rows is None:
            self._rows = StandingRows(read_events(self._folder))
        self._rows.take(event)
        is_end = event["event"] in ENDS
        for writer in self._writers:
            if event["event"] == "epoch" or is_end:
                writer.write([*self._rows])
            if is_end:
                writer.close()
        if event["event"] == "combined":  # branches that other processes have trained are in their logs
            self._rows = None


def check_names(names: Sequence[str]) -> None:
    """Raise if a log format is unknown or given twice."""
    for name in names:
        if name not in LOGS:
            raise GrowpruneError(f"log must be one of {', '.join(LOGS)}, got {name!r}")
    if len({*names}) < len(names):
        raise GrowpruneError(f"log must have each format once, got {', '.join(names)}")
