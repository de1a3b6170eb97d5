"""What must be the same for a run to go on: its recipe, and the tensors of its model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch

from growprune.engine.folder import RunFolder, digest_of, parts_of, phases_of
from growprune.engine.recipe import Recipe, describe
from growprune.errors import GrowpruneError, shorten
from growprune.masks.layers import dense_shape
from growprune.plan import Plan
from growprune.sparse.model import SparseModel

MAY_CHANGE = {
    "task.data",
    "task.workers",
    "weights",
    "storage",
    "checkpoint_seconds",
    "exploration",
    "claim",
    "log",
    "replicas",
    "shard",
    "timeout_seconds",
}
"""Fields of a recipe that may be other when a run is resumed: they have no influence on results, or, as where data and
weights lie, what they lead to is looked at itself."""


def check_same_recipe(folder: RunFolder, recipe: Recipe) -> None:
    """Raise, naming the first field that differs, unless a run was started with this recipe."""
    given, stored = fields_of(recipe), flat(folder.read_recipe()["recipe"])
    for name in [name for name in {**given, **stored} if name not in MAY_CHANGE]:
        if name not in given:
            raise GrowpruneError(
                f"{folder.path} was started with {name}={_short(stored[name])}, but the recipe now has no {name}: put "
                f"it back, or start a new run"
            )
        if name not in stored or stored[name] != given[name]:
            with_what = f"with {name}={_short(stored[name])}" if name in stored else f"without {name}"
            raise GrowpruneError(
                f"{folder.path} was started {with_what}, but the recipe now says {_short(given[name])}: put it back, "
                f"or start a new run"
            )


def check_same_plan(folder: RunFolder, plan: Plan) -> None:
    """Raise, naming the first phase that differs, if the same recipe now gives another plan.

    A default has changed then, or the code of a method.
    """
    began, now = folder.read_plan(), json.loads(json.dumps(phases_of(plan)))
    for old, new in zip_longest(began["phases"], now) if began else ():
        if old != new:
            raise GrowpruneError(
                f"{folder.path} was started with another plan: where it has {_short(_edits(old))}, its recipe now "
                f"gives {_short(_edits(new))}; {_SAME_CODE}"
            )
    if began and began["sha256"] != digest_of(plan):  # a way from one sparsity to another is one row of phases
        raise GrowpruneError(
            f"{folder.path} was started with another plan: its phases look the same in plan.json, but not each number "
            f"in them is; {_SAME_CODE}"
        )


def check_same_parts(folder: RunFolder, plan: Plan) -> None:
    """Raise, naming the first part that differs, if the model is another, or cut otherwise.

    Of a run that is not finished, the checkpoint tells the same of every tensor.
    """
    began, now = folder.read_plan().get("parts", {}), parts_of(plan)
    for name in {**began, **now} if began else ():
        if began.get(name) != now.get(name):
            raise GrowpruneError(
                f"{folder.path} was started with another model, or cut otherwise: its part {name} was "
                f"{_short(began.get(name, 'not there'))}, and is {_short(now.get(name, 'not there'))} now; {_SAME_CODE}"
            )


_SAME_CODE = "go on with the version of growprune, and of your own code, that began it, or start anew"


def check_same_work(folder: RunFolder, recipe: Recipe, iterations_per_epoch: int) -> None:
    """Raise unless a run was of the plan, and of the parts, that its recipe gives now."""
    plan = recipe.plan(recipe.shapes(), iterations_per_epoch)
    check_same_plan(folder, plan)
    check_same_parts(folder, plan)


def check_same_result(folder: RunFolder, recipe: Recipe, result: Mapping[str, Any]) -> None:
    """As `check_same_work`, of a run that is finished: its result says how long an epoch is, so no data are read."""
    num_batches = (result.get("data") or {}).get("num_batches")
    if num_batches or not recipe.counts_iterations:
        check_same_work(folder, recipe, math.ceil((num_batches or 1) / recipe.accumulate))


def _edits(phase: Any) -> Any:
    return "no phase" if phase is None else phase.get("edits", phase) if isinstance(phase, dict) else phase


def fields_of(recipe: Recipe) -> dict[str, Any]:
    """Every setting of a recipe as plain JSON values, by dotted names such as `task.width`."""
    return flat(json.loads(json.dumps(describe(recipe))))  # as it comes back from a file


def flat(content: Any, prefix: str = "") -> dict[str, Any]:
    """{"task": {"width": 3}} -> {"task.width": 3}"""
    if not isinstance(content, dict) or not content:
        return {prefix.removesuffix("."): content}
    return {name: value for key, inside in content.items() for name, value in flat(inside, f"{prefix}{key}.").items()}


def _short(value: Any) -> str:
    return shorten(repr(value), 200)


def tensors_of(sparse: SparseModel) -> dict[str, str]:
    """Every parameter and buffer of a model, and what it is, whatever its storage.

    >>> tensors_of(SparseModel(torch.nn.Linear(4, 2), sparsity=0.5))
    {'weight': 'prunable float32 (2, 4)', 'bias': 'float32 (2,)'}
    """
    prunable = {weight.parameter for weight in sparse.weights}
    found = {}
    for name, parameter in sparse.model.named_parameters():
        path, _, local = name.rpartition(".")
        what = _describe_tensor(dense_shape(sparse.model.get_submodule(path), local), parameter.dtype)
        found[name] = f"prunable {what}" if name in prunable else what
    return found | {name: _describe_tensor(tuple(b.shape), b.dtype) for name, b in sparse.model.named_buffers()}


def _describe_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {shape}"


def check_same_tensors(sparse: SparseModel, stored: Mapping[str, str]) -> None:
    """Raise, naming the first that differs, unless a model has the tensors that a checkpoint has (`tensors_of`)."""
    found = tensors_of(sparse)
    for name in {**found, **stored}:
        if found.get(name) != stored.get(name):
            raise GrowpruneError(
                f"the model is not the one that was trained: {name} is {found.get(name, 'not there')} now, and "
                f"{stored.get(name, 'not there')} in the checkpoint; go back to that code, or start a new run"
            )
