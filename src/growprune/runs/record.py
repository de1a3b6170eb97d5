"""A run as read from its folder: finished, unfinished, failed or damaged; and how runs are found.

A folder, or one `results.json` for many, which experiments/run.py writes: it has for each folder what its `result.json`
had. Values that all runs share are stored once; lists of entries, such as the history, are stored as columns, and may
be left out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from growprune.errors import GrowpruneError
from growprune.files import disk
from growprune.files.disk import NUMBER
from growprune.logs.rows import StandingRows, read_events
from growprune.runs.result import NAMES, Json, Metric, Result

RESULTS = "results.json"
"""The name of the file in which a study keeps the results of all its runs."""
PACKED_FORMAT = 1
_NAMES: disk.Names = {"format": int, "shared": dict, "runs": dict, "runs.*": dict, "tunings": dict, "tunings.*": dict}
_ENTRY: Json = {"branch": None, "stage": 0, "edits": ""}
"""What an entry of the history is if its columns were left out."""


def read_packed(file: Path) -> tuple[dict[str, Json], dict[str, Json]]:
    """The content of each `result.json` by folder, and of each `tuning.json` by folder."""
    content = disk.read_json(file, _NAMES, "restore it from where it came from")
    if content["format"] != PACKED_FORMAT:
        raise GrowpruneError(
            f"{file} has format {content['format']}, this version reads {PACKED_FORMAT}. Upgrade growprune"
        )
    runs, shared = {}, content["shared"]
    for name, own in content["runs"].items():
        both = {field: shared[field] | value for field, value in own.items() if field in shared}
        runs[name] = run = {**shared, **own, **both}
        run["history"] = [_ENTRY | entry for entry in _entries(run.get("history"))]
        run["sparsity"] = {**run["sparsity"], "rows": _entries(run["sparsity"].get("rows"))}
    return runs, content["tunings"]


def _entries(columns: Json | None) -> list[Json]:
    """The entries of columns, without the fields that are null."""
    found = columns or {}
    rows = zip(*found.values(), strict=True)
    return [{name: value for name, value in zip(found, row, strict=True) if value is not None} for row in rows]


DENSE = "dense"
"""The method of the dense baseline. Any other method is one of those compared, also at sparsity 0."""
SMALL_DENSE = "small_dense"
"""Name in tables for dense runs of a small model of the size of a sparse one. Their method is DENSE too."""
EQUAL = ("nonzeros", "flops")
"""Quantities in which a small dense model can equal a sparse one."""

_EPOCH: disk.Names = {
    **{"epoch": int, "iteration": int, "stage": int, "branch?": int, "alive": int, "edits": str, "loss?": NUMBER},
    **{"validation?": dict, "validation?.*": NUMBER, "explored?": NUMBER, "churn?": NUMBER, "metric?": str},
}
"""Required fields of an epoch in a log. Damaged lines are skipped."""
_SMALL: disk.Names = {
    **{"equal": str, "sparsity": NUMBER, "task": dict, "of": dict, "target": NUMBER, "weights": NUMBER},
    "flops": NUMBER,
}


def failure_file(folder: Path) -> Path:
    """The file beside a run folder with the error of a failed run of a comparison."""
    return folder.with_name(f"{folder.name}.failed")


def in_full(number: float) -> str:
    """Format a number with all its digits, so that different sparsities never look the same.

    >>> in_full(0.9), in_full(0.0), in_full(0.9000001)
    ('0.9', '0', '0.9000001')
    """
    return repr(float(number)).removesuffix(".0")


def small_name(equal: str) -> str:
    """The name of a small dense row in tables.

    >>> small_name("nonzeros"), small_name("flops"), small_name("")
    ('small_dense', 'small_dense:flops', '')
    """
    return equal and (SMALL_DENSE if equal == EQUAL[0] else f"{SMALL_DENSE}:{equal}")


NEAR = 0.1
"""Relative difference from its target size above which tables note it for a small dense model."""


def say_small(small: Json, *, at_length: bool = False) -> str:
    """Describe the size of a small dense model.

    >>> small = {"equal": "nonzeros", "task": {"width": 10}, "of": {"width": 32}, "target": 0.1, "weights": 0.103}
    >>> say_small(small), say_small(small, at_length=True)
    ('width 10: 10.3 % of the weights', 'width 10 instead of 32: 10.3 % of the weights, target 10 %')
    """
    what, share = ("weights", small["weights"]) if small["equal"] == EQUAL[0] else ("FLOPs", small["flops"])
    sizes = [f"{name} {value:g}" for name, value in small["task"].items()] or ["the full width"]
    if not at_length:
        return f"{sizes[0]}: {100 * share:.3g} % of the {what}"
    changed = [f"{size} instead of {small['of'][name]:g}" for size, name in zip(sizes, small["task"], strict=False)]
    off = abs(share / small["target"] - 1)
    nearest = f"; the nearest possible, {off:.0%} off" if off > NEAR else ""
    wanted = f"{100 * share:.3g} % of the {what}, target {100 * small['target']:.3g} %"
    return f"{', '.join(changed or sizes)}: {wanted}{nearest}"


TUNING = "tuning.json"
"""File in the folder of a row at one sparsity: how it was tuned. The runs are two folders below."""


@dataclass(frozen=True)
class Record:
    """One run, as read from its folder."""

    path: Path
    """The run folder, or a result file without its folder."""
    name: str = ""
    """The shortest path that distinguishes it from the other runs."""
    recipe: Json = field(default_factory=dict)
    """The recipe as JSON values. Empty if the run has not started."""
    origin: Json = field(default_factory=dict)
    """How to find the recipe again, if the command line started the run."""
    result: Result | None = None
    """What it has found out, if it is finished."""
    damage: str = ""
    """What is wrong with its files, in one line. Empty if nothing is."""
    tuning: Json = field(default_factory=dict)
    """How its row was tuned, as in `tuning.json`. Empty without tuning."""

    @property
    def status(self) -> str:
        """finished, unfinished, failed or damaged."""
        return self._fate[0]

    @property
    def why(self) -> str:
        """Why the run is not finished."""
        return self._fate[1]

    @cached_property
    def _fate(self) -> tuple[str, str]:
        if self.damage:
            return "damaged", self.damage
        if self.result is not None:
            return "finished", ""
        if not self.recipe:
            return "unfinished", "it has not started: there is no recipe.json"
        if (failure := failure_file(self.path)).is_file():
            return "failed", failure.read_text()
        kinds = ("failed", "interrupted", "resumed", "phase", "epoch")
        events = [event for event in self.events if event["event"] in kinds]
        last = events[-1] if events else {"event": ""}
        if last["event"] == "failed":
            return "failed", str(last.get("message", ""))
        epoch = max((event["epoch"] for event in events if event["event"] == "epoch"), default=0)
        return "unfinished", f"{'interrupted' if last['event'] == 'interrupted' else 'last seen'} after epoch {epoch}"

    @property
    def is_finished(self) -> bool:
        return self.result is not None

    @property
    def folder(self) -> Path:
        return self.path.parent if self.path.is_file() else self.path

    # What was asked for

    @property
    def method(self) -> str:
        """Name of the method."""
        return small_name(self.small.get("equal", "")) or str(self.recipe.get("method", "unknown"))

    @property
    def is_dense(self) -> bool:
        """True for the dense baseline that others are compared with."""
        return self.trains_dense and not self.small

    @property
    def trains_dense(self) -> bool:
        return self.recipe.get("method") == DENSE

    @cached_property
    def small(self) -> Json:
        """For a small dense model, its target and size as stored by `make_small`. Empty for all others."""
        found = (self.recipe.get("options") or {}).get("small") if self.trains_dense else None
        return {} if found is None or disk.fault(found, _SMALL) else dict(found)

    @property
    def is_passed_over(self) -> bool:
        """True for a point of a grid that is not the chosen one."""
        return bool(self.tuning) and self.folder.parent.name != self.tuning.get("folder")

    @property
    def sparsity(self) -> float:
        """The target sparsity. Dense training ignores the sparsity of its recipe."""
        if self.small:
            return float(self.small["sparsity"])
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
        """The logged events of all its processes."""
        events = [] if self.path.is_file() else read_events(self.path)
        known = [event for event in events if event["event"] != "epoch" or not disk.fault(event, _EPOCH)]
        return [{"branch": None, **event} for event in known]

    @cached_property
    def history(self) -> list[Json]:
        """One row per epoch. Branches of a fork have rows of the same epoch."""
        if self.result is not None:
            return self.result.history
        rows = {(e["stage"], e["branch"], e["iteration"]): e for e in self.events if e["event"] == "epoch"}
        standing = [rows[row.stage, row.branch, row.iteration] for row in StandingRows(self.events)]
        return sorted(standing, key=lambda e: (e["epoch"], e["stage"], -1 if e["branch"] is None else e["branch"]))

    @property
    def epochs(self) -> int:
        """Epochs trained so far, in all phases and branches."""
        result = self.result
        if result is None or not result.training_iterations or not result.data:
            return len(self.history)
        per_epoch: int = max(1, math.ceil(result.data["num_batches"] / (self.recipe.get("accumulate") or 1)))
        return round(result.training_iterations / per_epoch)

    @property
    def final_epochs(self) -> int | None:
        """Epochs of the whole training. None if the run is not finished."""
        return self.epochs if self.is_finished else None

    # What came of it

    @cached_property
    def metric(self) -> Metric:
        """The metric of the run."""
        if self.result is not None:
            return Metric(self.result.metric, self.result.lower_is_better)
        first = next(iter(self.history), {})
        return Metric(first.get("metric") or "", bool(first.get("lower_is_better")))

    @property
    def test(self) -> float | None:
        """The metric of the last model on test data."""
        return None if self.result is None else self.result.test.get(self.metric.name)

    @property
    def validation(self) -> float | None:
        """The metric of the last model on validation data, which may select runs."""
        return None if self.result is None else self.result.validation.get(self.metric.name)

    @property
    def num_prunable(self) -> float | None:
        """Number of prunable weights. For a small model, that of the full model it is compared with."""
        own = self.total("prunable")
        return None if own is None else own / self.small.get("weights", 1)

    @property
    def reached(self) -> float | None:
        """The sparsity of the last model. For a small model, as a model with the weights of the full one."""
        prunable = self.num_prunable
        return None if prunable is None else 1 - self.total("alive") / prunable if prunable else 0.0

    @property
    def peak_alive(self) -> float | None:
        """The most weights alive at once, as a share of the prunable ones."""
        return _share(self.figure("peak_alive"), self.num_prunable)

    @property
    def average_alive(self) -> float | None:
        """Live weights per iteration, as a share of the prunable ones."""
        return _share(self.figure("average_alive"), self.num_prunable)

    @property
    def dense_flops(self) -> float | None:
        """FLOPs of the forward pass of the dense model, for one example. For a small model, of the full one."""
        own = self.total("flops_dense")
        return own / self.small.get("flops", 1) if own else None

    @property
    def inference_flops(self) -> float | None:
        """FLOPs of the forward pass of the last model, as a share of the dense model."""
        return _share(self.total("flops_sparse"), self.dense_flops)

    def training_flops(self, dense_epochs: float | None = None) -> float | None:
        """FLOPs of the training, as a share of dense training for some epochs. By default, for as many as its own."""
        examples, epochs, dense = self.figure("training_examples"), self.epochs, self.dense_flops
        if not examples or not epochs or not dense:
            return None
        return _share(self.figure("training_flops"), 3 * dense * examples * (dense_epochs or epochs) / epochs)

    def figure(self, name: str) -> Any:
        """A field of the result. None if unknown."""
        return getattr(self.result, name, None)

    def total(self, name: str) -> Any:
        """A total of the final model. None if unknown."""
        return None if self.result is None else self.result.sparsity["totals"].get(name)


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


FORMAT = 4
"""Format version of run folders. A run of another format is refused."""
OWN = ("recipe", "format", "inode", "job")
"""Keys of recipe.json that are not part of the origin."""
_RECIPE: disk.Names = {
    **{"recipe.task.name": str, "recipe.method": str, "recipe.sparsity": NUMBER, "recipe.options?": dict},
    **{"recipe.seed?": int, "recipe.accumulate?": int, "format?": int, "inode?": int, "job?": str},
    **{"source?": str, "settings?": dict, "settings?.*": str, "row?": str, "files?": dict, "files?.*": str},
}
_TUNING: disk.Names = {
    **{"row": str, "sparsity": NUMBER, "grid": dict, "grid.*": list, "size": int, "seed": int, "metric": str},
    **{"chosen?": str, "folder?": str, "points": list, "points.*.name": str, "points.*.folder": str},
    **{"points.*.status": str, "points.*.validation?": NUMBER, "points.*.error": str},
}
"""Required fields of tuning.json."""


def find_runs(paths: Sequence[Path]) -> list[Record]:
    """Find every run at or below some paths, each once, in this order.

    A path is a run folder, a folder of runs, a result.json, or a folder that a `results.json` stands for. A
    folder without runs counts as a run that has not started.
    """
    found: dict[Path, Record] = {}
    for record in (record for path in paths for record in _records(Path(path))):
        found.setdefault(record.path.resolve(), record)
    names = _names([*(record.path for record in found.values())])
    return [replace(record, name=name) for record, name in zip(found.values(), names, strict=True)]


def _records(given: Path) -> Iterator[Record]:
    if not given.exists():
        study = next((folder for folder in given.parents if (folder / RESULTS).is_file()), None)
        records = [] if study is None else _packed(study, given)
        if not records:
            raise GrowpruneError(f"{given} does not exist. Give run folders, folders of runs, or result.json files")
        yield from records
        return
    if given.is_file() and given.name != RESULTS:
        yield read_run(given.parent if given.name == "result.json" else given)  # the folder has more to show
        return
    is_empty = True
    for folder, subfolders, files in os.walk(given.parent if given.is_file() else given):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        if "result.json" in files or "recipe.json" in files:
            is_empty = False
            subfolders.clear()  # what lies in a run belongs to it, such as its earlier results
            yield read_run(Path(folder))
        elif RESULTS in files:
            is_empty = False
            yield from _packed(Path(folder), Path(folder))
    if is_empty:
        yield read_run(given)


def _packed(folder: Path, below: Path) -> list[Record]:
    """The runs at or below a path, from the results file of a folder."""
    try:
        runs, tunings = read_packed(folder / RESULTS)
    except (GrowpruneError, OSError) as error:
        return [Record(folder / RESULTS, damage=" ".join(str(error).split()))]
    records = []
    for name, content in runs.items():
        place = folder / name
        if below in (place, *place.parents) and not (place / "result.json").exists():
            tuning = tunings.get(Path(name).parent.parent.as_posix(), {})
            if wrong := disk.fault(content, NAMES):
                records.append(Record(place, damage=f"{folder / RESULTS} is damaged ({wrong} in {name})"))
            else:
                result = Result.from_dict(content)
                records.append(Record(place, "", result.recipe, result.origin, result, tuning=tuning))
    return records


def _names(places: Sequence[Path]) -> list[str]:
    """The shortest paths that distinguish the runs."""
    folders = [place.parent if place.is_file() else place for place in places]
    if len(set(folders)) < len(folders):  # several files of a folder
        folders = list(places)
    common = Path(os.path.commonpath(folders)) if len(folders) > 1 else Path(*folders).parent
    return [folder.relative_to(common).as_posix() for folder in folders]


def read_recipe(folder: Path) -> Json:
    """Read recipe.json. Raise GrowpruneError if the folder has no run, or one of another format."""
    file = folder / "recipe.json"
    try:
        content = disk.read_json(file, _RECIPE, "restore a copy of it, or start a new run elsewhere")
    except OSError as error:
        raise GrowpruneError(
            f"{folder} is no run folder: cannot read {file.name} ({error.strerror or error}). Give the folder that "
            f"was --out of `growprune train`"
        ) from error
    if (found := content.get("format") or 1) != FORMAT:
        age, remedy = ("a newer", "upgrade growprune") if found > FORMAT else ("an older", "start a new run")
        raise GrowpruneError(
            f"{folder} was started by {age} growprune: it has format {found}, this version reads {FORMAT}. Use that "
            f"version, or {remedy}"
        )
    return content


def origin_of(content: Json) -> Json:
    """How to find the recipe again, from the content of recipe.json."""
    return {name: value for name, value in content.items() if name not in OWN}


def read_run(place: Path) -> Record:
    """Read a run from its folder, or from a result file. A damaged run becomes a record that says why."""
    file = place if place.is_file() else place / "result.json"
    try:
        stored = read_recipe(place) if (place / "recipe.json").exists() else {"recipe": {}}
        tuning, tuned = {}, file.parent.parent.parent / TUNING
        if tuned.exists():
            tuning = disk.read_json(tuned, _TUNING, "remove it and run growprune compare again to write it again")
        if not file.exists():
            return Record(place, "", stored["recipe"], origin_of(stored), tuning=tuning)
        result = Result.read(file)
        return Record(place, "", result.recipe, origin_of(stored) or result.origin, result, tuning=tuning)
    except (GrowpruneError, OSError) as error:
        return Record(place, damage=" ".join(str(error).split()))
