"""Small dense models: a task's model made narrower until its size or cost equals that of a sparse one."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from growprune.engine.recipe import Recipe
from growprune.errors import GrowpruneError
from growprune.sparse.flops import Flops, count_flops
from growprune.sparse.model import SparseModel
from growprune.tasks.task import Task


@dataclass(frozen=True)
class Size:
    """Size of a model with all weights alive."""

    weights: int
    """Number of weights of prunable layers. Embeddings, norms and biases do not count."""
    flops: Flops
    names: tuple[str, ...]
    """Names of the prunable weights."""


def make_small(recipe: Recipe, sparsity: float, equal: str) -> Recipe:
    """Return a recipe with a narrower task. Its option `small` says what it equals and how closely.

    With "nonzeros" it has about as many prunable weights as the sparse model has non-zeros. With "flops" its forward
    pass costs about as many FLOPs as that of a sparse model with the same sparsity in each layer. The densities of a
    global allocation are not known in advance.
    """
    if recipe.weights:
        raise GrowpruneError(
            f"small_dense trains a narrower model, so it cannot start from weights={recipe.weights}. Leave the row "
            f"out, or add --set weights="
        )
    full = size_of(recipe, recipe.task)
    density = 1 - sparsity
    target, of = density * full.weights, _weights
    if equal == "flops":
        target, of = full.flops.at(dict.fromkeys(full.names, density)), _flops
    task, size = _nearest(recipe, target, of)
    small = {"equal": equal, "sparsity": sparsity, "task": changed(recipe.task, task), "of": changed(task, recipe.task)}
    shares = {"weights": size.weights / full.weights, "flops": size.flops.dense / full.flops.dense}
    small |= {"target": target / of(full), **shares}
    # a pattern of blocks, which may not fit the narrow layers, means nothing to a dense model
    return replace(recipe, task=task, pattern="unstructured", options={**recipe.options, "small": small})


def _weights(size: Size) -> int:
    return size.weights


def _flops(size: Size) -> int:
    return size.flops.dense


def _nearest(recipe: Recipe, target: float, of: Callable[[Size], int]) -> tuple[Task, Size]:
    """The task whose size is nearest to a target. Of two equally near, the narrower."""
    tasks = recipe.task.narrower()
    sizes: dict[int, Size] = {}

    def measured(index: int) -> int:
        if index not in sizes:
            sizes[index] = size_of(recipe, tasks[index])
        return of(sizes[index])

    above = bisect.bisect_left(range(len(tasks) - 1), target, key=measured)
    best = min((max(0, above - 1), above), key=lambda index: abs(measured(index) - target))
    return tasks[best], sizes[best]


def size_of(recipe: Recipe, task: Task) -> Size:
    """The size of a task's model, from its shapes."""
    model = replace(recipe, task=task).shapes()
    with torch.device("meta" if task.initialises_modules else "cpu"):
        example = task.example()
    sparse = SparseModel(model, sparsity=0.0, keep_dense=recipe.settings.kept_dense(model)[0], include=recipe.include)
    return Size(sparse.num_prunable, count_flops(model, example), tuple(weight.name for weight in sparse.weights))


def changed(task: Task, other: Task) -> dict[str, Any]:
    """The settings of another task that differ from this one."""
    names = [field.name for field in fields(task)]  # type: ignore[arg-type]  # a recipe takes only dataclasses
    return {name: getattr(other, name) for name in names if getattr(other, name) != getattr(task, name)}
