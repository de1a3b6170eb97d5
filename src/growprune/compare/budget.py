"""What a row trains: how many epochs, the options that use exactly those, and how wide small dense models are."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from growprune.engine.cost import estimate
from growprune.engine.recipe import Recipe
from growprune.errors import GrowpruneError
from growprune.masks.partition import PARTS, Partition
from growprune.plan import Plan, declaration_of
from growprune.plan.phases import fill_lengths, plan_length
from growprune.plan.settings import check_counts
from growprune.sparse.flops import Flops, count_flops
from growprune.sparse.model import SparseModel
from growprune.tasks.task import Task

KINDS = ("epochs", "flops", "paper")
PAPER_RATIO = {"cyclic_gap": 4, "parallel_gap": 4, "random_gap": 4, "gradual_gap": 4, "parallel_gradual_gap": 4}
"""Training length of the GaP methods in the paper, about, as a multiple of dense."""


@dataclass(frozen=True)
class Budget:
    kind: str
    epochs: int
    """Epochs of dense training."""
    max_epochs: int
    """Limit of every row with equal FLOPs."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise GrowpruneError(f"--budget must be one of {', '.join(KINDS)}, got {self.kind!r}")
        check_counts(1, epochs=self.epochs)
        check_counts(self.epochs, max_epochs=self.max_epochs)

    def __str__(self) -> str:
        if self.kind == "flops":
            return f"as many training FLOPs as {self.epochs} dense epochs, in at most {self.max_epochs} epochs"
        return f"{self.epochs} epochs" + (", and 4 times as many for GaP" if self.kind == "paper" else "")

    def epochs_of(self, method: Callable[..., Plan], at: Callable[[int], Recipe], share: float = 1.0) -> int:
        """The number of epochs of a row. `at` returns its recipe for a number of epochs.

        For a small model, `share` is the cost of its forward pass as a fraction of the full one.
        """
        if self.kind == "paper":
            return self.epochs * PAPER_RATIO.get(method.__name__, 1)
        if self.kind == "flops":
            least = _fewest(at, self.epochs, self.max_epochs)
            target = round(3 * estimate(at(least)).dense_flops / share * self.epochs)
            return nearest(lambda epochs: estimate(at(epochs)).training_flops, target, least, self.max_epochs)
        return self.epochs


def _fewest(at: Callable[[int], Recipe], least: int, most: int) -> int:
    """The fewest epochs that a method needs, such as one per part. Raise if `most` is too few."""

    def is_enough(epochs: int) -> bool:
        try:
            at(epochs)
        except GrowpruneError:
            return False
        return True

    at(most)  # raises errors that do not depend on the number of epochs
    return least + bisect.bisect_left(range(least, most), True, key=is_enough)


def nearest(price: Callable[[int], int], target: int, least: int, most: int) -> int:
    """The number of epochs whose price is nearest to a target.

    The price grows with the epochs, with jumps where a step gets one more. Small decreases are ignored.
    """
    price = functools.cache(price)
    above = least + bisect.bisect_left(range(least, most), target, key=price)
    close = range(max(least, above - 3), min(most, above + 2) + 1)
    return min(close, key=lambda n: (abs(price(n) - target), n))


def spend(recipe: Recipe, epochs: int, iterations_per_epoch: int, S: Partition | None = None) -> Recipe:
    """Return the recipe with options that make its plan as long as `epochs`. Options that are set stay.

    Args:
        S: its `parts_of`, if known.
    """
    S = parts_of(recipe) if S is None else S
    about = declaration_of(recipe.method)
    if about.parts:  # so that results contain it
        number = recipe.parts if isinstance(recipe.parts, int) else recipe.chosen()["parts"].num_parts
        recipe = replace(recipe, options={about.parts: number or min(PARTS, len(S)), **recipe.options})
    if about.length == "iterations":
        lengths = _in_iterations(recipe, S, epochs, iterations_per_epoch)
    else:
        lengths = _in_epochs(recipe, S, epochs)
    return replace(recipe, options={**lengths, **recipe.options})


def num_epochs(recipe: Recipe, iterations_per_epoch: int, S: Partition | None = None) -> float:
    """Epochs of all phases and all branches, as the paper counts them."""
    plan = recipe.plan_over(parts_of(recipe) if S is None else S, iterations_per_epoch)
    return plan_length(plan, iterations_per_epoch) / iterations_per_epoch


def shape_of(recipe: Recipe) -> nn.Module:
    """The model of a task, without values."""
    with torch.device("meta"):
        return recipe.task.build_model()


def parts_of(recipe: Recipe, model: nn.Module | None = None) -> Partition:
    """The parts of the task's model, which is built if it is not given."""
    model = shape_of(recipe) if model is None else model
    return recipe.settings.cut(model, recipe.settings.kept_dense(model)[0])


def cut_as_usual(recipe: Recipe) -> Recipe:
    """Return the recipe with the kind of partition that suits its method, and the same number of parts."""
    number = recipe.chosen()["parts"].num_parts
    is_contiguous = declaration_of(recipe.method).partition == "contiguous"
    if recipe.parts is None or (is_contiguous and number):  # which may be cut by hand
        return recipe
    return replace(recipe, parts=number)


def _in_iterations(recipe: Recipe, S: Partition, epochs: int, per_epoch: int) -> dict[str, int]:
    """Options for a method in iterations. If branches count their own, choose iterations that total about `epochs`."""

    def at(**length: int) -> float:
        return num_epochs(replace(recipe, options={**recipe.options, **length}), per_epoch, S)

    lengths = fill_lengths(recipe.method, recipe.options, epochs * per_epoch, parts=len(S))
    del lengths["iterations"]
    if {"iterations", "epochs"} & recipe.options.keys():
        return lengths
    if at(epochs=epochs) == epochs:
        return lengths | {"epochs": epochs}
    over = bisect.bisect_right(range(epochs * per_epoch), False, key=lambda n: at(iterations=n) > epochs)
    around = [max(1, over - 1), max(1, over)]
    return lengths | {"iterations": min(around, key=lambda n: abs(at(iterations=n) - epochs))}


def _in_epochs(recipe: Recipe, S: Partition, epochs: int) -> dict[str, int]:
    branches = 1
    if declaration_of(recipe.method).length == "steps * epochs + finetune":
        step = {"steps": 1, "epochs": 1, "finetune": 0}
        branches = round(num_epochs(replace(recipe, options={**recipe.options, **step}), 1, S))
    lengths = fill_lengths(recipe.method, recipe.options, epochs, parts=len(S), branches=branches)
    needed = lengths.get("steps", 0) * branches * lengths.get("epochs", 0)
    if needed > epochs:
        raise GrowpruneError(
            f"{recipe.method.__name__} needs {needed} epochs for {lengths['steps']} steps, but the budget is {epochs}. "
            f"Increase --epochs, or use fewer parts with --set parts=contiguous(2)"
        )
    return lengths


def num_iterations_per_epoch(recipe: Recipe) -> int:
    return math.ceil(recipe.task.num_batches() / recipe.accumulate)


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
