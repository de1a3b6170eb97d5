"""Reading runs: folders, folders of folders, or bare results. A run that is not whole is a record too, and says why."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from growprune.engine import json_file
from growprune.engine.compatibility import asked_sparsity, is_dense
from growprune.engine.folder import RunFolder
from growprune.engine.metric import Metric
from growprune.errors import GrowpruneError

Json = dict[str, Any]

SKIPPED = ("checkpoints", "earlier")
"""Folders inside a run that hold no runs to show: an earlier outcome was replaced by the run's own."""
FILES = ("result.json", "recipe.json", "plan.json", "log.jsonl")
"""A folder with any of them is a run."""

_ROW: json_file.Names = {"loss?": json_file.NUMBER, "iteration?": int, "epochs?": int, "validation?": dict}
_RESULT: json_file.Names = {
    **{"recipe.task": dict, "recipe.method": str, "recipe.sparsity": json_file.NUMBER, "recipe.seed?": int},
    **{"recipe.accumulate?": int, "data?": dict, "data?.num_batches?": int, "training_iterations?": int},
    **{"validation?": dict, "validation?.*": json_file.NUMBER, "best?.test?": dict, "phases?.*.epochs?": int},
    **{
        "seconds": json_file.NUMBER,
        "metric?": str,
        "lower_is_better?": bool,
        "environment?": dict,
        "sparsity.rows?": list,
    },
    **{
        f"sparsity.rows?.*.{name}": kind
        for name, kind in (("name", str), ("size", int), ("sparsity", json_file.NUMBER))
    },
    **{"sparsity.rows?.*.target?": json_file.NUMBER, "sparsity.totals.sparsity": json_file.NUMBER},
    **{f"sparsity.totals.{name}?": json_file.NUMBER for name in ("flops_dense", "flops_sparse")},
    **{f"{name}?": json_file.NUMBER for name in ("peak_bytes", "training_flops", "peak_alive", "average_alive")},
    **{f"history?.*.{name}": kind for name, kind in _ROW.items()},
    **{"origin?": dict, "origin?.source?": str, "origin?.settings?": dict},
}
"""What the page needs of a result beside what the engine asks of it."""
_EVENTS: dict[str, json_file.Names] = {
    "epoch": {
        **{"epoch": int, "stage": int, "branch?": int, "alive": int, "edits": str, "metric?": str, **_ROW},
        **{"validation?.*": json_file.NUMBER, "explored?": json_file.NUMBER, "churn?": json_file.NUMBER},
    },
    "phase": {
        **{"index": int, "stage": int, "branch?": int, "alive": int, "edits": str, "iterations": int, "epochs": int},
    },
}
"""What an event must have to be shown."""


@dataclass(frozen=True)
class Record:
    """What is known of a run."""

    path: Path
    name: str
    status: str
    """finished, unfinished, failed or damaged"""
    why: str = ""
    recipe: Json = field(default_factory=dict)
    origin: Json = field(default_factory=dict)
    """How to find the recipe again, if the command line started the run."""
    history: list[Json] = field(default_factory=list)
    """A row an epoch; the branches of a fork have rows of the same epoch. Results of the first format: one a phase."""
    phases: list[Json] = field(default_factory=list)
    """The phases as they were logged, if the folder has a log."""
    result: Json | None = None

    @property
    def is_finished(self) -> bool:
        return self.result is not None

    @property
    def method(self) -> str:
        """Its name, without what Python's own words force upon it."""
        return str(self.recipe.get("method", "unknown")).rstrip("_")

    @property
    def sparsity(self) -> float:
        return asked_sparsity(self.recipe)

    @property
    def is_dense(self) -> bool:
        return is_dense(self.recipe)

    @property
    def seed(self) -> int:
        return int(self.recipe.get("seed") or 0)

    @property
    def task(self) -> Json:
        return dict(self.recipe.get("task") or {})

    @cached_property
    def metric(self) -> Metric:
        """The number that says how good a model is; of old results, the first that the task gives."""
        given = [row["validation"] for row in self.history if row.get("validation")]
        given += [self.result["test"]] if self.result is not None else []
        first = next((str(name) for metrics in given for name in metrics), "")
        says = self.result if self.result is not None else next(iter(self.history), {})  # rows of a log say it too
        return Metric.of(says, otherwise=first)

    @property
    def quality(self) -> float | None:
        """Of the last model, on test data."""
        return None if self.result is None else self.result["test"].get(self.metric.name)

    @property
    def validation(self) -> float | None:
        """Of the last model, on validation data: what may choose between runs."""
        scores = {} if self.result is None else self.result.get("validation") or {}
        return scores.get(self.metric.name)

    @property
    def epochs(self) -> int:
        """Of all phases and of all branches, as far as the run went."""
        if self.result is not None and "phases" in self.result:  # the first format: a row a phase
            return sum(int(row.get("epochs") or 0) for row in self.history)
        done, per_epoch = self._iterations
        return round(done / per_epoch) if done and per_epoch else len(self.history)

    @property
    def _iterations(self) -> tuple[int, int]:
        """How many were trained, and how many an epoch has; (0, 0) of results that do not say."""
        result = self.result or {}
        batches = (result.get("data") or {}).get("num_batches") or 0
        return result.get("training_iterations") or 0, -(-batches // (self.recipe.get("accumulate") or 1))

    @property
    def prunable(self) -> int | None:
        return None if self.result is None else int(self.result["sparsity"]["totals"]["prunable"])

    def total(self, name: str) -> float | None:
        """One of the totals of the final model."""
        return None if self.result is None else self.result["sparsity"]["totals"].get(name)


def find_runs(paths: Sequence[Path]) -> list[Record]:
    """Every run at or under some paths, each once; raises GrowpruneError if there is none."""
    if not paths:
        raise GrowpruneError("report was given no run: give run folders, folders of runs, or result.json files")
    places: dict[Path, Path] = {}
    for given in paths:
        for place in _places(Path(given)):
            is_of_folder = place.is_file() and place.name == "result.json"  # which has more to show
            places.setdefault((place.parent if is_of_folder else place).resolve(), place)
    if not any(_is_run(place) for place in places):
        raise GrowpruneError(f"{', '.join(map(str, paths))} holds no run: none has a recipe.json or a result.json")
    names = _names(list(places))
    records = [_read(place, name) for place, name in zip(places, names, strict=True)]
    return sorted(records, key=lambda record: (record.method, record.sparsity, record.name))


def _places(given: Path) -> Iterator[Path]:
    """Run folders and result files under a path; a folder without any stands for a run that has not begun."""
    if not given.exists():
        raise GrowpruneError(f"{given} does not exist: give run folders, folders of runs, or result.json files")
    if given.is_file() or _is_run(given):
        yield given
        return
    found = False
    for folder, subfolders, files in os.walk(given):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED and not name.startswith("."))
        if any(name in files for name in FILES[:2]):
            found = True
            subfolders.clear()  # what lies in a run belongs to it
            yield Path(folder)
    if not found:
        yield given


def _is_run(place: Path) -> bool:
    return place.is_file() or any((place / name).exists() for name in FILES)


def _names(places: Sequence[Path]) -> list[str]:
    """As short as they are told apart."""
    folders = [place.parent if place.is_file() else place for place in places]
    if len(set(folders)) < len(folders):  # several files of a folder
        folders = list(places)
    common = Path(os.path.commonpath(folders)) if len(folders) > 1 else folders[0].parent
    return [folder.relative_to(common).as_posix() for folder in folders]


def _read(place: Path, name: str) -> Record:
    try:
        return _read_file(place, name) if place.is_file() else _read_folder(place, name)
    except (GrowpruneError, OSError) as error:
        return Record(place, name, "damaged", " ".join(str(error).split()))


def _read_file(path: Path, name: str) -> Record:
    class Bare(RunFolder):
        @property
        def result(self) -> Path:
            return path

    return _finished(path, name, Bare(path.parent).read_result(), {}, [])


def _read_folder(path: Path, name: str) -> Record:
    folder = RunFolder(path)
    events = list(_events(path))
    phases = _phases(events)
    origin = folder.read_recipe() if folder.recipe.exists() else {}
    recipe = origin.pop("recipe", {})
    if folder.result.exists():
        return _finished(path, name, folder.read_result(), origin, phases)
    if not recipe:
        return Record(path, name, "unfinished", "it has not begun: there is no recipe.json")
    status, why = _how_far(events)
    return Record(path, name, status, why, recipe, origin, _history(events), phases)


def _finished(path: Path, name: str, result: Json, origin: Json, phases: list[Json]) -> Record:
    json_file.read(path if path.is_file() else path / "result.json", _RESULT, "put a copy of it back")
    origin = origin or dict(result.get("origin") or {})
    return Record(path, name, "finished", "", result["recipe"], origin, list(result["history"]), phases, result)


def _events(folder: Path) -> Iterator[Json]:
    """What was logged by all processes; of others than the first, only what they did in branches."""
    for log in sorted(folder.glob("log*.jsonl")):
        with log.open("rb") as lines:
            for line in lines:
                with contextlib.suppress(ValueError, RecursionError):  # a line that a kill cut short
                    event = json.loads(line)
                    if _is_whole(event) and (log.name == "log.jsonl" or event.get("branch") is not None):
                        yield {"branch": None, **event}


def _is_whole(event: Any) -> bool:
    if not isinstance(event, dict):
        return False
    return not json_file.fault(event, _EVENTS.get(str(event.get("event")), {}))


def _phases(events: Sequence[Json]) -> list[Json]:
    """In order; of a phase that was trained again after a kill, the last time."""
    by_index = {event["index"]: event for event in events if event.get("event") == "phase"}
    return [by_index[index] for index in sorted(by_index)]


def _history(events: Sequence[Json]) -> list[Json]:
    rows = [event for event in events if event.get("event") == "epoch"]
    by_place = {(row["epoch"], row["stage"], row["branch"]): row for row in rows}
    places = sorted(by_place, key=lambda place: (place[0], place[1], -1 if place[2] is None else place[2]))
    return [by_place[place] for place in places]


def _how_far(events: Sequence[Json]) -> tuple[str, str]:
    """Whether a run failed or was just not finished, by what was logged of it last."""
    told = [event for event in events if event.get("event") in ("failed", "interrupted", "resumed", "phase", "epoch")]
    epoch = max((event["epoch"] for event in told if event["event"] == "epoch"), default=0)
    last = told[-1]["event"] if told else ""
    if last == "failed":
        return "failed", str(told[-1].get("message", ""))
    return "unfinished", f"{'stopped' if last == 'interrupted' else 'seen last'} after epoch {epoch}"
