"""What is known of a run, whatever became of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from growprune.engine import json_file
from growprune.engine.json_file import NUMBER
from growprune.engine.metric import Metric
from growprune.logs.rows import StandingRows, read_events

Json = dict[str, Any]

DENSE = "dense"
"""The method of the dense baseline. Any other method is one of those compared, also at sparsity 0."""

_EVENTS: dict[str, json_file.Names] = {
    "epoch": {
        **{"epoch": int, "iteration": int, "stage": int, "branch?": int, "alive": int, "edits": str, "loss?": NUMBER},
        **{"validation?": dict, "validation?.*": NUMBER, "explored?": NUMBER, "churn?": NUMBER, "metric?": str},
    },
    "phase": {
        **{"index": int, "stage": int, "branch?": int, "alive": int, "edits": str, "iterations": int, "epochs": int},
    },
}
"""What a line of a log must have; lines that someone changed are skipped."""


def failure_file(folder: Path) -> Path:
    """The file beside a run's folder in which a comparison keeps why the run failed."""
    return folder.with_name(f"{folder.name}.failed")


@dataclass(frozen=True)
class Record:
    """One run."""

    path: Path
    """Its folder, or the file of a result that was kept without one."""
    name: str = ""
    """The shortest path that tells it from the runs it was found with."""
    recipe: Json = field(default_factory=dict)
    """As JSON has it; empty if the run has not begun."""
    origin: Json = field(default_factory=dict)
    """How to find the recipe again, if the command line started the run."""
    result: Json | None = None
    """What `result.json` has, once the run is finished."""
    damage: str = ""
    """What is wrong with its files, in one line."""
    row: str = ""
    """The row of a table that it belongs to, if it stands in one."""

    @property
    def status(self) -> str:
        """finished, unfinished, failed or damaged"""
        return self._fate[0]

    @property
    def why(self) -> str:
        """Why it is not finished."""
        return self._fate[1]

    @cached_property
    def _fate(self) -> tuple[str, str]:
        if self.damage:
            return "damaged", self.damage
        if self.result is not None:
            return "finished", ""
        if not self.recipe:
            return "unfinished", "it has not begun: there is no recipe.json"
        if (failure := failure_file(self.path)).exists():
            return "failed", failure.read_text()
        kinds = ("failed", "interrupted", "resumed", "phase", "epoch")
        events = [event for event in self.events if event["event"] in kinds]
        last = events[-1] if events else {"event": ""}
        if last["event"] == "failed":
            return "failed", str(last.get("message", ""))
        epoch = max((event["epoch"] for event in events if event["event"] == "epoch"), default=0)
        return "unfinished", f"{'stopped' if last['event'] == 'interrupted' else 'seen last'} after epoch {epoch}"

    @property
    def is_finished(self) -> bool:
        return self.result is not None

    @property
    def folder(self) -> Path:
        return self.path.parent if self.path.is_file() else self.path

    # What was asked for

    @property
    def method(self) -> str:
        """Its name, without the underscore that Python's keywords force upon it."""
        return str(self.recipe.get("method", "unknown")).rstrip("_")

    @property
    def is_dense(self) -> bool:
        return self.recipe.get("method") == DENSE

    @property
    def sparsity(self) -> float:
        """The target; dense training ignores the sparsity of its recipe."""
        return 0.0 if self.is_dense else float(self.recipe.get("sparsity") or 0.0)

    @property
    def seed(self) -> int:
        return int(self.recipe.get("seed") or 0)

    @property
    def task(self) -> Json:
        return dict(self.recipe.get("task") or {})

    # How it went

    @cached_property
    def events(self) -> list[Json]:
        """The log of all its processes."""
        events = [] if self.path.is_file() else read_events(self.path)
        known = [event for event in events if not json_file.fault(event, _EVENTS.get(event["event"], {}))]
        return [{"branch": None, **event} for event in known]

    @cached_property
    def phases(self) -> list[Json]:
        """The phases as they were logged, in order; empty without a log. One that was trained again counts once."""
        by_index = {event["index"]: event for event in self.events if event["event"] == "phase"}
        return [by_index[index] for index in sorted(by_index)]

    @cached_property
    def history(self) -> list[Json]:
        """A row for each epoch; the branches of a fork have rows of the same epoch."""
        if self.result is not None:
            return list(self.result["history"])
        rows = {(e["stage"], e["branch"], e["iteration"]): e for e in self.events if e["event"] == "epoch"}
        standing = [rows[row.stage, row.branch, row.iteration] for row in StandingRows(self.events)]
        return sorted(standing, key=lambda e: (e["epoch"], e["stage"], -1 if e["branch"] is None else e["branch"]))

    @property
    def epochs(self) -> int:
        """Trained so far, in all phases and branches."""
        done, data = self.figure("training_iterations"), self.figure("data")
        if not done or not data:
            return len(self.history)
        per_epoch: int = max(1, math.ceil(data["num_batches"] / (self.recipe.get("accumulate") or 1)))
        return round(int(done) / per_epoch)

    @property
    def final_epochs(self) -> int | None:
        """Epochs of the whole training; None if the run is not finished."""
        return self.epochs if self.is_finished else None

    # What came of it

    @cached_property
    def metric(self) -> Metric:
        """The number that says how good the model is."""
        return Metric.of(self.result if self.result is not None else next(iter(self.history), {}))

    @property
    def quality(self) -> float | None:
        """Of the last model, on test data."""
        return (self.figure("test") or {}).get(self.metric.name)

    @property
    def validation(self) -> float | None:
        """Of the last model, on validation data: what may choose between runs."""
        return (self.figure("validation") or {}).get(self.metric.name)

    def figure(self, name: str) -> Any:
        """An entry of the result; None if it is unknown."""
        return None if self.result is None else self.result.get(name)

    def total(self, name: str) -> Any:
        """One of the totals of the final model; None if it is unknown."""
        return None if self.result is None else self.result["sparsity"]["totals"].get(name)
