"""Budgets: how many epochs a row trains for, and the options with which its method spends exactly those."""

from __future__ import annotations

import bisect
import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from growprune.engine.cost import estimate
from growprune.engine.recipe import Recipe, own_options
from growprune.errors import GrowpruneError
from growprune.masks.partition import Partition
from growprune.masks.partition_kinds import parse_partition
from growprune.plan import Plan
from growprune.plan.lengths import PARTS, fill_lengths, plan_length
from growprune.plan.settings import check_counts

KINDS = ("epochs", "flops", "paper")
PAPER_RATIO = {"cyclic_gap": 4, "parallel_gap": 4, "random_gap": 4, "gradual_gap": 4, "parallel_gradual_gap": 4}
"""How many times as long as dense the GaP methods train in the paper, about."""


@dataclass(frozen=True)
class Budget:
    kind: str
    epochs: int
    """Those of dense training."""
    max_epochs: int
    """What no row goes beyond where FLOPs are equal."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise GrowpruneError(f"--budget is {self.kind!r}, but must be one of {', '.join(KINDS)}")
        check_counts(1, epochs=self.epochs)
        check_counts(self.epochs, max_epochs=self.max_epochs)

    def __str__(self) -> str:
        if self.kind == "flops":
            return f"as many training FLOPs as {self.epochs} dense epochs, in at most {self.max_epochs} epochs"
        return f"{self.epochs} epochs" + (", and 4 times as many for GaP" if self.kind == "paper" else "")

    def epochs_of(self, method: Callable[..., Plan], at: Callable[[int], Recipe]) -> int:
        """How many a row trains for; `at` gives its recipe for a number of epochs."""
        if self.kind == "paper":
            return self.epochs * PAPER_RATIO.get(method.__name__, 1)
        if self.kind == "flops":
            least = _fewest(at, self.epochs, self.max_epochs)
            target = 3 * estimate(at(least)).dense_flops * self.epochs
            return nearest(lambda epochs: estimate(at(epochs)).training_flops, target, least, self.max_epochs)
        return self.epochs


def _fewest(at: Callable[[int], Recipe], least: int, most: int) -> int:
    """The fewest epochs that a method can do with, such as one for each part; raises if the most are too few."""

    def is_enough(epochs: int) -> bool:
        try:
            at(epochs)
        except GrowpruneError:
            return False
        return True

    at(most)  # what is wrong with every number of epochs is said here
    return least + bisect.bisect_left(range(least, most), True, key=is_enough)


def nearest(price: Callable[[int], int], target: int, least: int, most: int) -> int:
    """The number of epochs whose price is nearest to a target.

    The price grows with the epochs, by leaps where a step gets one more; a little back and forth is looked past.
    """
    price = functools.cache(price)
    above = least + bisect.bisect_left(range(least, most), target, key=price)
    close = range(max(least, above - 3), min(most, above + 2) + 1)
    return min(close, key=lambda n: (abs(price(n) - target), n))


def spend(recipe: Recipe, epochs: int, iterations_per_epoch: int) -> Recipe:
    """Return the recipe with options that make its plan last the epochs; options it has already stay as they are."""
    recipe = _with_kappa(recipe, recipe.partition.num_parts or PARTS)
    S = _parts_of(recipe)
    if "iterations" in own_options(recipe.method):
        lengths = _in_iterations(recipe, S, epochs, iterations_per_epoch)
    else:
        lengths = _in_epochs(recipe, S, epochs)
    return replace(recipe, options={**lengths, **recipe.options})


def check_length(recipe: Recipe, epochs: int, iterations_per_epoch: int) -> None:
    """Raise unless a recipe trains for the epochs."""
    total = num_epochs(recipe, iterations_per_epoch)
    if round(total) != epochs:  # branches in iterations may leave a few over
        options = ", ".join(f"{name}={value}" for name, value in recipe.options.items())
        raise GrowpruneError(
            f"{recipe.method.__name__} trains for {total:g} epochs with {options}, but the budget is {epochs}: give it "
            f"options that add up to that, or --allow epochs"
        )


def num_epochs(recipe: Recipe, iterations_per_epoch: int) -> float:
    """Return the epochs of all phases, those of all branches included, as the paper counts them."""
    return _length(recipe, _parts_of(recipe), iterations_per_epoch)


def _parts_of(recipe: Recipe) -> Partition:
    with torch.device("meta"):
        model = recipe.task.build_model()
    return recipe.partition.cut(model, keep_dense=recipe.keep_dense, include=recipe.include)


def cut_as_usual(recipe: Recipe) -> Recipe:
    """Return the recipe with the kind of partition that its method is meant for, in as many parts as it has."""
    kind, parts = getattr(recipe.method, "partition", "contiguous"), recipe.partition.num_parts
    recipe = _with_kappa(recipe, parts or PARTS)
    if kind == "contiguous" and parts:  # which may be cut by hand
        return recipe
    return replace(recipe, partition=parse_partition(kind, kappa=parts or PARTS))


def _with_kappa(recipe: Recipe, kappa: int) -> Recipe:
    """A method that draws its own sets of layers is given their number."""
    parameter = inspect.signature(recipe.method).parameters.get("kappa")
    is_asked = parameter is not None and parameter.default is inspect.Parameter.empty
    return replace(recipe, options={"kappa": kappa, **recipe.options}) if is_asked else recipe


def _in_iterations(recipe: Recipe, S: Partition, epochs: int, per_epoch: int) -> dict[str, int]:
    """All epochs; of a method whose machines count their own, as many iterations as make about that many in all."""

    def at(**length: int) -> float:
        return _length(replace(recipe, options={**recipe.options, **length}), S, per_epoch)

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
    if "steps" in own_options(recipe.method):
        step = {"steps": 1, "epochs": 1, "finetune": 0}
        branches = round(_length(replace(recipe, options={**recipe.options, **step}), S, 1))
    lengths = fill_lengths(recipe.method, recipe.options, epochs, parts=len(S), branches=branches)
    needed = lengths.get("steps", 0) * branches * lengths.get("epochs", 0)
    if needed > epochs:
        raise GrowpruneError(
            f"{recipe.method.__name__} needs {needed} epochs for {lengths['steps']} steps, but the budget is {epochs}: "
            f"give more --epochs, or fewer parts with --set partition=contiguous(2)"
        )
    return lengths


def _length(recipe: Recipe, S: Partition, per_epoch: int) -> float:
    return plan_length(recipe.plan_over(S, per_epoch), per_epoch) / per_epoch


def num_iterations_per_epoch(recipe: Recipe) -> int:
    return math.ceil(recipe.task.num_batches() / recipe.accumulate)
