"""Carries a recipe out: `train` starts a run in a folder, `resume` goes on with one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from growprune.engine import checkpoint
from growprune.engine.batch_split import digest
from growprune.engine.device import choose_device, environment
from growprune.engine.folder import Event, RunFolder
from growprune.engine.process_group import PeerFailed, join, leave, may_be_restarted, wait_for_all
from growprune.engine.recipe import Recipe, describe
from growprune.engine.run import Interrupted, Run
from growprune.engine.training import TrainingDiverged
from growprune.errors import GrowpruneError
from growprune.plan import walk

__all__ = [
    "Event",
    "Interrupted",
    "PeerFailed",
    "Recipe",
    "Run",
    "RunFolder",
    "TrainingDiverged",
    "leave",
    "resume",
    "train",
]


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    origin: dict[str, Any] | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Carry a recipe out in a new folder, and return what `result.json` holds."""
    folder = RunFolder(Path(out), join(choose_device(recipe.device), recipe.timeout_seconds))
    if may_be_restarted() and folder.recipe.exists():
        return resume(recipe, out, origin=origin, on_event=on_event, should_stop=should_stop)
    folder.check_free(recipe)
    run = Run(recipe, folder, on_event=on_event, should_stop=should_stop)  # one that cannot run leaves no folder
    run.mesh.barrier("starting")
    if run.mesh.is_first:
        folder.create(recipe, origin or {})
        folder.write_plan(run.plan)
        folder.store_files(run.files())
    with folder.locked():
        check_processes_agree(run)
        return run.execute()


def check_processes_agree(run: Run) -> None:
    """Make sure that all processes of a run do the same, before they do it."""
    run.mesh.barrier("starting")
    batch = next(run.task.batches(seed=0, start=0, device=torch.device("cpu")), None) if run.mesh.world > 1 else None
    recipe = _with_task_fields(describe(run.recipe)) | {"task.data": None}  # which may lie elsewhere on each machine
    version = environment(run.device) | {"commit": None}  # which a machine without git does not know
    texts = {"recipe": json.dumps(recipe), "version": json.dumps(version)}
    texts |= {"data": digest(batch), "view of the run folder, which all must share,": run.folder.recipe_text()}
    run.mesh.agree(texts, "starting")


def resume(
    recipe: Recipe,
    out: str | Path,
    *,
    extend: int = 0,
    origin: dict[str, Any] | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Go on with a run where its newest whole checkpoint stands; with `extend`, search that many steps more.

    The recipe must be the one the run was started with, but for what has no influence on results (`MAY_CHANGE`).
    """
    folder = RunFolder(Path(out), join(choose_device(recipe.device), recipe.timeout_seconds))
    _compare(folder, recipe)
    if extend:
        recipe = _extend(folder, recipe, extend)
        wait_for_all()
    elif folder.result.exists():
        return folder.read_result()
    with folder.locked():
        run = Run(recipe, folder, on_event=on_event, should_stop=should_stop)
        folder.store_files(run.files())
        run.mesh.barrier("resuming")
        if run.mesh.is_first:
            folder.write_recipe(recipe, folder.read_origin() if origin is None or extend else origin)
            folder.write_plan(run.plan)
        check_processes_agree(run)
        found = checkpoint.load_newest(folder.checkpoints, run.warn)
        if found is not None:
            run.restore(*found)
        return run.execute()


MAY_CHANGE = {
    "task.data",
    "task.workers",
    "storage",
    "checkpoint_seconds",
    "claim",
    "replicas",
    "timeout_seconds",
    "sync_batchnorm",
}
"""Fields of a recipe that may be other when a run is resumed."""


def _compare(folder: RunFolder, recipe: Recipe) -> None:
    stored = _with_task_fields(folder.read_recipe()["recipe"])
    given = _with_task_fields(json.loads(json.dumps(describe(recipe))))
    for name in {**given, **stored}.keys() - MAY_CHANGE:
        if stored.get(name) != given.get(name):
            raise GrowpruneError(
                f"{folder.path} was started with {name}={stored.get(name)!r}, but the recipe now says "
                f"{given.get(name)!r}: put it back, or start a new run"
            )


def _with_task_fields(recipe: dict[str, Any]) -> dict[str, Any]:
    """A described recipe, its task's fields beside its own."""
    task = recipe.pop("task")
    return recipe | {f"task.{name}": value for name, value in task.items()}


def _extend(folder: RunFolder, recipe: Recipe, steps: int) -> Recipe:
    """Take a finished run back to the end of its search, and lengthen the search."""
    longer = recipe.extended(steps)
    if not folder.result.exists():
        raise GrowpruneError(
            f"{folder.path} is not finished, so it cannot be extended: resume it without --extend first"
        )
    number = folder.kept()
    if not number:
        raise GrowpruneError(f"{folder.path} has no checkpoint at the end of its search, so it cannot be extended")
    state = checkpoint.load(folder.checkpoints / f"{number[0]:08d}")
    model = recipe.task.build_model()
    old, new = list(walk(recipe.plan(model))), list(walk(longer.plan(model)))
    done = state["index"] + 1
    if old[:done] != new[:done]:
        raise GrowpruneError(
            f"{folder.path} cannot be extended: with more steps, its method would have begun otherwise"
        )
    wait_for_all()  # until here every process looks; from here the first one changes what they looked at
    if folder.rank == 0:
        origin = folder.read_origin()
        folder.set_aside()
        checkpoint.remove_old(folder.checkpoints, number)
        folder.write_recipe(longer, {**origin, "extended": origin.get("extended", 0) + steps})
    return longer
