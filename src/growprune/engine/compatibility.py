"""Checks before a run is resumed: its recipe and its plan must be the same."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from growprune.engine.folder import RunFolder, digest_of, parts_of, phases_of
from growprune.engine.recipe import Recipe, describe
from growprune.errors import GrowpruneError, shorten
from growprune.files.json_file import finite
from growprune.plan import Plan
from growprune.runs.comparable import MAY_CHANGE, flat


def check_same_recipe(folder: RunFolder, recipe: Recipe) -> None:
    """Raise if a run was started with another recipe. The error names the first field that differs."""
    given, stored = fields_of(recipe), flat(folder.read_recipe()["recipe"])
    for name in [name for name in {**given, **stored} if name not in MAY_CHANGE]:
        if name not in given:
            raise GrowpruneError(
                f"{folder.path} was started with {name}={_short(stored[name])}, but the recipe has no {name} now. "
                f"Restore it, or start a new run"
            )
        if name not in stored or stored[name] != given[name]:
            with_what = f"with {name}={_short(stored[name])}" if name in stored else f"without {name}"
            raise GrowpruneError(
                f"{folder.path} was started {with_what}, but the recipe has {_short(given[name])} now. Restore it, or "
                f"start a new run"
            )


def check_same_plan(folder: RunFolder, plan: Plan) -> None:
    """Raise if the same recipe now gives another plan. The error names the first phase that differs.

    This happens if a default or the code of a method has changed.
    """
    began, now = folder.read_plan(), json.loads(json.dumps(phases_of(plan)))
    for old, new in zip_longest(began["phases"], now) if began else ():
        if old != new:
            raise GrowpruneError(
                f"{folder.path} was started with another plan: it has {_short(_edits(old))}, but the recipe gives "
                f"{_short(_edits(new))} now. {_SAME_CODE}"
            )
    if began and began["sha256"] != digest_of(plan):  # a way from one sparsity to another is one row of phases
        raise GrowpruneError(
            f"{folder.path} was started with another plan: its phases look the same in plan.json, but some numbers "
            f"in them differ. {_SAME_CODE}"
        )


def check_same_parts(folder: RunFolder, plan: Plan) -> None:
    """Raise if the model or its parts differ from those of the run. The error names the first part that differs.

    For an unfinished run, `check_same_tensors` checks every tensor of the checkpoint.
    """
    began, now = folder.read_plan().get("parts", {}), parts_of(plan)
    for name in {**began, **now} if began else ():
        if began.get(name) != now.get(name):
            raise GrowpruneError(
                f"{folder.path} was started with another model or other parts: part {name} was "
                f"{_short(began.get(name, 'missing'))}, and is {_short(now.get(name, 'missing'))} now. {_SAME_CODE}"
            )


_SAME_CODE = "Resume with the versions of growprune and of your code that started it, or start a new run"


def check_same_work(folder: RunFolder, recipe: Recipe, iterations_per_epoch: int) -> None:
    """Raise if the recipe of a run now gives another plan or other parts."""
    plan = recipe.plan(recipe.shapes(), iterations_per_epoch)
    check_same_plan(folder, plan)
    check_same_parts(folder, plan)


def check_same_result(folder: RunFolder, recipe: Recipe, result: Mapping[str, Any]) -> None:
    """`check_same_work` for a finished run. Its result has the length of an epoch, so no data is read."""
    num_batches = (result.get("data") or {}).get("num_batches")
    if num_batches or not recipe.counts_iterations:
        check_same_work(folder, recipe, math.ceil((num_batches or 1) / recipe.accumulate))


def _edits(phase: Any) -> Any:
    return "no phase" if phase is None else phase.get("edits", phase) if isinstance(phase, dict) else phase


def fields_of(recipe: Recipe) -> dict[str, Any]:
    """Every setting of a recipe as plain JSON values, by dotted names such as `task.width`."""
    return flat(json.loads(json.dumps(finite(describe(recipe)))))  # as it comes back from a file


def _short(value: Any) -> str:
    return shorten(repr(value), 200)
