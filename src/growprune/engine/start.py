"""Start a run in a new folder, or resume one.

A process that writes to a folder holds its lock. Invalid input is refused before the folder is made. Checks of the
folder are repeated under the lock, because another process may have come first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from growprune.engine.batches import digest
from growprune.engine.compatibility import check_same_plan, check_same_recipe, check_same_result, fields_of
from growprune.engine.device import choose_device, environment
from growprune.engine.events import Event
from growprune.engine.folder import RunFolder
from growprune.engine.mesh import ask_first, is_restart_of, join, may_be_restarted, wait_for_all
from growprune.engine.optim import require
from growprune.engine.recipe import Recipe
from growprune.engine.run import Run
from growprune.files import checkpoint


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    origin: dict[str, Any] | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Train a recipe in a new folder, and return the content of `result.json`.

    Args:
        out: the run folder. It must be new or empty.
        origin: where the recipe comes from, for the records of the run.
        on_event: called with each event of the log, such as an epoch.
        should_stop: asked after each iteration. If it returns True, a checkpoint is saved and `Interrupted` raised.
    """
    _check_recipe(recipe)
    folder = RunFolder(Path(out), join(choose_device(recipe.device), recipe.timeout_seconds))
    if ask_first(_is_ours(folder)):
        if folder.result.exists():
            _say(folder, on_event, f"{folder.path} was finished before this restart. Its result is kept")
        return resume(recipe, out, origin=origin, on_event=on_event, should_stop=should_stop)
    folder.check_free(recipe)
    run = Run(recipe, folder, listeners=[on_event], should_stop=should_stop)  # one that cannot run leaves no folder
    run.mesh.barrier("starting")
    if run.mesh.is_first:
        folder.make()
    with folder.locked():
        if run.mesh.is_first:
            folder.check_free(recipe)
            _write_what_runs(run, origin or {})
            folder.store_files(run.files)
        check_processes_agree(run)
        return run.execute()


def _check_recipe(recipe: object) -> None:
    how = "a growprune.Recipe (for a named one, use growprune.recipes.find(name))"
    require(isinstance(recipe, Recipe), "recipe", recipe, how)


def _is_ours(folder: RunFolder) -> bool:
    """True if the folder has the run of this job, because torchrun restarted the processes after a failure.

    An unfinished run is resumed, whoever started it. The result of an earlier job is not taken for ours.
    """
    if not may_be_restarted() or not folder.recipe.exists():
        return False
    return not folder.result.exists() or is_restart_of(folder.read_recipe().get("job") or "")


def _say(folder: RunFolder, on_event: Callable[[Event], None], message: str) -> None:
    event = {"event": "warning", "message": message}
    folder.append(event)
    on_event(event)


def _write_what_runs(run: Run, origin: dict[str, Any]) -> None:
    run.folder.write_recipe(run.recipe, origin)
    run.folder.write_plan(run.plan)


def check_processes_agree(run: Run) -> None:
    """Raise if the processes of a run have different recipes, plans or data."""
    if run.mesh.world == 1:
        return
    run.mesh.barrier("starting")
    sees = run.folder.recipe.read_text() if run.folder.recipe.is_file() else "nothing"
    batch = next(iter(run.task.batches(seed=0, start=0, device=torch.device("cpu"))), None)
    recipe = fields_of(run.recipe) | {"task.data": None, "weights": None}  # which may lie elsewhere on each machine
    version = environment(run.device) | {"commit": None}  # which a machine without git does not know
    texts = {
        "recipe": json.dumps(recipe),
        "version": json.dumps(version),
        "data": digest(batch),
        "weights": json.dumps(run.weights),
        "view of the run folder, which all must share,": sees,
    }
    run.mesh.agree(texts, "starting")


def resume(
    recipe: Recipe,
    out: str | Path,
    *,
    origin: dict[str, Any] | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Resume a run from its newest complete checkpoint.

    The recipe must be the one the run was started with, except for fields that do not change results (`MAY_CHANGE`).

    Args:
        out: the run folder.
        origin, on_event, should_stop: as in `train`.
    """
    _check_recipe(recipe)
    folder = RunFolder(Path(out), join(choose_device(recipe.device), recipe.timeout_seconds))
    check_same_recipe(folder, recipe)
    with folder.locked():
        wait_for_all()
        check_same_recipe(folder, recipe)
        if ask_first(folder.result.exists()):
            result = folder.read_result()
            check_same_result(folder, recipe, result)
            folder.check_model(result)
            return result
        run = Run(recipe, folder, listeners=[on_event], should_stop=should_stop)
        check_same_plan(folder, run.plan)
        folder.store_files(run.files)
        run.mesh.barrier("resuming")
        if run.mesh.is_first:
            _write_what_runs(run, folder.read_origin() if origin is None else origin)
        check_processes_agree(run)
        found = checkpoint.load_newest(folder.checkpoints, run.events.warn)
        if found is not None:
            run.restore(*found)
        elif run.mesh.is_first and not any(folder.checkpoints.glob("*")):  # damaged ones were named already
            run.events.warn(f"{folder.path} has no checkpoint yet, so it starts over. See checkpoint_seconds")
        return run.execute()
