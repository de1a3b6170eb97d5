"""What came of runs, read from their files: each finished, failed or unfinished, with the figures a table needs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from growprune.compare.fairness import Facts, facts_of, varying
from growprune.compare.jobs import Job
from growprune.engine import json_file
from growprune.engine.compatibility import (
    MAY_CHANGE,
    asked_sparsity,
    check_same_recipe,
    check_same_work,
    fields_of,
    flat,
    is_dense,
)
from growprune.engine.folder import RunFolder
from growprune.engine.json_file import NUMBER
from growprune.engine.metric import Metric, in_full
from growprune.engine.recipe import describe
from growprune.errors import GrowpruneError
from growprune.tasks import TASKS

_NAMES: json_file.Names = {
    "recipe.task.name": str,
    "recipe.method": str,
    "recipe.sparsity": NUMBER,
    "recipe.options": dict,
    "recipe.seed?": int,
    "recipe.accumulate?": int,
    "seed": int,
    "metric?": str,
    "lower_is_better?": bool,
    "data?.num_batches": int,
    "training_iterations?": int,
    "environment?": dict,
    "history?": list,
    "phases?": list,
    "phases?.*.epochs": int,
    "validation": dict,
    "validation.*": NUMBER,
    "test": dict,
    "test.*": NUMBER,
    "sparsity.totals.alive": int,
    "sparsity.totals.prunable": int,
    "sparsity.totals.flops_dense?": int,
    "sparsity.totals.flops_sparse?": int,
    "peak_bytes": int,
    "seconds": NUMBER,
    "training_flops?": int,
    "training_examples?": int,
    "peak_alive?": int,
    "average_alive?": NUMBER,
}


@dataclass(frozen=True)
class Outcome:
    """One run of a comparison."""

    row: str
    """The name of its row."""
    recipe: Mapping[str, Any]
    """As JSON has it; empty if nothing is known of the run."""
    sparsity: float
    """What was asked for."""
    seed: int
    folder: Path
    result: Mapping[str, Any] | None = None
    """What `result.json` has, once it is finished."""
    error: str = ""
    """Why it failed."""

    @property
    def status(self) -> str:
        return "finished" if self.result is not None else "failed" if self.error else "unfinished"

    @property
    def epochs(self) -> int | None:
        """How many were trained, those of all branches."""
        return None if self.result is None else _num_epochs(self.result)

    @property
    def is_dense(self) -> bool:
        return is_dense(self.recipe)

    def facts(self, *, with_epochs: bool) -> Facts:
        name = f"{self.row} {in_full(self.sparsity)} seed {self.seed}"
        result = self.result or {}
        more = {"epochs": self.epochs if with_epochs else None, "signature": result.get("signature") or None}
        return facts_of(name, self.recipe, data=result.get("data"), **more)


def of_jobs(jobs: Sequence[Job]) -> list[Outcome]:
    """What came of the runs of a comparison; raises if a folder holds another run than its job."""
    return [_of_job(job) for job in jobs]


def _of_job(job: Job) -> Outcome:
    recipe = describe(job.recipe)
    result = read_result(job.folder / "result.json") if job.is_finished else None
    return Outcome(job.row.name, recipe, job.sparsity, job.seed, job.folder, result, job.error)


def of_paths(paths: Sequence[Path], allowed: Sequence[str] = ()) -> list[Outcome]:
    """What came of runs that are there: their folders, folders with some anywhere below, or result.json files."""
    places: dict[Path, Path] = {}
    for folder in (folder for path in paths for folder in _folders(path)):
        places.setdefault(_place(folder), folder)
    found = _named_apart([_of_folder(folder) for folder in places.values()], allowed)
    if not found:
        raise GrowpruneError("there is nothing to compare: give folders of runs, or a recipe with --methods")
    return found


def check_apart(outcomes: Sequence[Outcome]) -> None:
    """Raise if two runs are of one row and seed."""
    seen: dict[Any, Outcome] = {}
    for outcome in outcomes:
        if (other := seen.setdefault((outcome.row, outcome.sparsity, outcome.seed), outcome)) is not outcome:
            raise GrowpruneError(
                f"{other.folder} and {outcome.folder} are the same row and seed: leave one of them out"
            )


def _named_apart(outcomes: Sequence[Outcome], allowed: Sequence[str]) -> list[Outcome]:
    """Runs that differ in what is allowed are different rows, and their names say in what."""
    facts = [outcome.facts(with_epochs=True) for outcome in outcomes]
    known_ones = [known for known, outcome in zip(facts, outcomes, strict=True) if outcome.recipe]
    fields = [name for name in varying(known_ones, allowed) if name != "data"]
    named = []
    for outcome, known in zip(outcomes, facts, strict=True):
        options = outcome.recipe.get("options") or {}
        hidden = [name for name in fields if name != "epochs" or _is_plain(options)]
        said = {"epochs": options.get("epochs")} | known.fields  # one that is not finished has them in its recipe only
        extra = (f"{name}={said[name]}" for name in hidden if said.get(name) is not None)
        named.append(replace(outcome, row=" ".join([outcome.row, *extra])))
    return _cut_apart(named)


def _cut_apart(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Runs of one name that are cut into other parts, or count sparsity elsewhere, are different rows too."""
    by_name: dict[str, list[Mapping[str, str]]] = {}
    for outcome in outcomes:
        by_name.setdefault(outcome.row, []).append(_cut(outcome.recipe))
    named = []
    for outcome in outcomes:
        alike, own = by_name[outcome.row], _cut(outcome.recipe)
        differing = [name for name in own if len({other[name] for other in alike if name in other}) > 1]
        named.append(replace(outcome, row=" ".join([outcome.row, *(f"{name}={own[name]}" for name in differing)])))
    return named


def _cut(recipe: Mapping[str, Any]) -> dict[str, str]:
    """The partition and the scope of a sparse run, as far as its recipe says them."""
    if not recipe or is_dense(recipe):
        return {}
    cut = {"scope": str(recipe["scope"])} if "scope" in recipe else {}
    if isinstance(parts := recipe.get("partition"), dict):  # results of the first format have none
        kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(parts.get("name"))).lower()
        cut["partition"] = f"{kind}({', '.join(str(value) for key, value in parts.items() if key != 'name')})"
    return cut


def _folders(path: Path) -> list[Path]:
    """Folders of runs at or below a path; a folder that has none is one that has not begun."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise GrowpruneError(f"there is no {path}: give folders of runs, or a recipe with --methods")
    names = ("result.json", "recipe.json")
    if any((path / name).exists() for name in names):
        return [path]
    below = {found.parent for name in names for found in path.rglob(name) if not _is_set_aside(found.relative_to(path))}
    return sorted(below) or [path]


def _is_set_aside(below: Path) -> bool:
    """Whether a file is of what a run had before it was extended."""
    return "earlier" in below.parts


def _place(path: Path) -> Path:
    """Where a run is, however it was named: by its folder or its result, from here or from the root."""
    whole = path.resolve()
    return whole.parent if whole.name == "result.json" else whole


def _of_folder(path: Path) -> Outcome:
    file = path if path.is_file() else path / "result.json"
    if file.exists():
        result = read_result(file)
        recipe = result["recipe"]
        return Outcome(row_name(recipe), recipe, asked_sparsity(recipe), result["seed"], file.parent, result)
    if not (path / "recipe.json").exists():
        return Outcome(str(path), {}, 0.0, 0, path)
    recipe = RunFolder(path).read_recipe()["recipe"]
    failure = path.with_name(f"{path.name}.failed")
    error = failure.read_text() if failure.exists() else ""
    seed = int(recipe.get("seed") or 0)
    return Outcome(row_name(recipe), recipe, asked_sparsity(recipe), seed, path, None, error)


def row_name(recipe: Mapping[str, Any]) -> str:
    """The row that a run belongs to, where nobody has named it; the length of a plain training says its column."""
    options = recipe.get("options") or {}
    hidden = ("epochs", "iterations") if _is_plain(options) else ()
    shown = (f"{key}={value}" for key, value in options.items() if key not in hidden)
    name = recipe["method"] if is_dense(recipe) else f"{recipe['method']}:{recipe.get('allocation')}"
    return " ".join([name, *shown])


def _is_plain(options: Mapping[str, Any]) -> bool:
    """Whether its epochs are those of all the training, and no others."""
    return not {"steps", "finetune"} & options.keys()


def read_result(path: Path) -> dict[str, Any]:
    return json_file.read(path, _NAMES, "remove it and resume the run, which makes it again, or leave it out")


def metric_of(results: Sequence[Mapping[str, Any]]) -> Metric:
    """The number that says how good a model is."""
    for result in results:
        task = result["recipe"]["task"]["name"]
        known = next((kind.metric for kind in TASKS.values() if kind.__name__ == task), "")
        metric = Metric.of(result, otherwise=known or next(iter(result["test"]), ""))
        if not all(metric.name in one[split] for one in results for split in ("validation", "test")):
            raise GrowpruneError(
                f"the metric is {metric.name!r}, but not all results have it: they are of different tasks"
            )
        return metric
    return Metric("")


def _num_epochs(result: Mapping[str, Any]) -> int:
    """By iterations where they are counted; results of before have a row an epoch, the first ones a row a phase."""
    if result.get("training_iterations") and result.get("data"):
        per_epoch: int = max(1, math.ceil(result["data"]["num_batches"] / (result["recipe"].get("accumulate") or 1)))
        return round(int(result["training_iterations"]) / per_epoch)
    if result.get("phases") is not None:
        return sum(int(phase["epochs"]) for phase in result["phases"])
    return len(result.get("history") or ())


def check_same_run(job: Job, iterations_per_epoch: int) -> None:
    """Raise if the folder of a job holds another run than the job's: of another recipe, plan or model."""
    folder = RunFolder(job.folder)
    if folder.recipe.exists():
        check_same_recipe(folder, job.recipe)
        if folder.plan.exists():
            check_same_work(folder, job.recipe, iterations_per_epoch)
    elif job.is_finished:  # a result that was brought from elsewhere
        stored, wanted = flat(read_result(folder.result)["recipe"]), fields_of(job.recipe)
        for name in [name for name in wanted if name in stored and name not in MAY_CHANGE]:
            if stored[name] != wanted[name]:
                raise GrowpruneError(
                    f"{folder.result} is of a run with {name}={stored[name]!r}, but the comparison now says "
                    f"{wanted[name]!r}: put it back, or give another --out"
                )
