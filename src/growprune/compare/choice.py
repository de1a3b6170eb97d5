"""Chooses the point of the grid for each row: the best by validation data with the first seed. Test data is unused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from growprune.compare.grid import Grid
from growprune.compare.jobs import Job, writing_to
from growprune.files import json_file
from growprune.files.json_file import finite
from growprune.runs.metric import Metric
from growprune.runs.record import TUNING
from growprune.runs.tuned import FAILED


def try_out(trials: Sequence[Job], grid: Grid) -> dict[str, Any]:
    """Results of all points of a row, and the chosen one, as `tuning.json` stores them.

    Args:
        trials: the runs of all different points with the first seed. A point is chosen when all are finished or
            failed; among equals, the first.
    """
    points, metric = [_try(job) for job in trials], _metric(trials)
    scores = {n: point["validation"] for n, point in enumerate(points) if point["status"] == "finished"}
    best = metric.best(scores) if _is_over(points) else None
    chosen = {} if best is None else points[best]
    first = trials[0]
    about = {"row": first.row.name, "sparsity": first.sparsity, "grid": {k: [*v] for k, v in grid.items()}}
    about |= {"size": math.prod(map(len, grid.values())), "seed": first.seed, "metric": metric.name}
    return about | {"chosen": chosen.get("name"), "folder": chosen.get("folder"), "points": points}


def is_tuned(trials: Sequence[Job]) -> bool:
    """True if no point of a row is left to be trained."""
    return _is_over([_try(job) for job in trials])


def _is_over(points: Sequence[dict[str, Any]]) -> bool:
    return all(point["status"] in ("finished", FAILED) for point in points)


def _metric(trials: Sequence[Job]) -> Metric:
    task = trials[0].recipe.task
    return Metric(task.metric, task.lower_is_better)


def _try(job: Job) -> dict[str, Any]:
    """The result of one point. A run with a score of nan counts as failed."""
    run = job.read()
    status, error, score = run.status, job.error, run.validation
    if error or status == FAILED:  # a run that was not started here has said so in its log alone
        status, error = FAILED, error or run.why
    elif status == "finished" and (score is None or not math.isfinite(score)):
        status, error = FAILED, f"its validation {job.recipe.task.metric} is {score}"
    about = {"name": job.point.name, "folder": job.point.folder, "settings": dict(job.point.settings)}
    return about | {"status": status, "error": error, "validation": score}


def chosen_of(trials: Sequence[Job], grid: Grid) -> Job | None:
    """The chosen run, if the row is tuned and at least one point finished."""
    folder = try_out(trials, grid)["folder"]
    return next((job for job in trials if job.point.folder == folder), None)


def write(trials: Sequence[Job], grid: Grid) -> None:
    """Write tuning.json beside the runs, for later tables and pages."""
    folder = trials[0].folder.parent.parent
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        json_file.write(folder / TUNING, finite(try_out(trials, grid)))
