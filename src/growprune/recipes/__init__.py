"""Every recipe by its name. To add one: write a function that returns a `Recipe`, and add it to RECIPES of its module.

Names read `task-data/method-sparsity-allocation[-variant]`: `classification-imagenet/cyclic-80-uniform` is a row of the
paper, `classification-cifar10/...` the same in small, `classification-tiny/...` in seconds. The recipes of a task are
loaded when first used, so that a run loads those of its own task only.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from growprune.engine.recipe import Recipe
from growprune.engine.source import called, is_source, load
from growprune.errors import GrowpruneError

if TYPE_CHECKING:
    RECIPES: dict[str, Callable[[], Recipe]]

TASKS = ("digits", "classification", "detection", "segmentation", "translation", "language")
"""The modules of recipes, each with those of one task in its RECIPES."""


def __getattr__(name: str) -> Any:
    if name == "RECIPES":
        return {name: make for task in TASKS for name, make in _recipes_of(task).items()}
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _recipes_of(task: str) -> dict[str, Callable[[], Recipe]]:
    recipes: dict[str, Callable[[], Recipe]] = importlib.import_module(f"{__name__}.{task}").RECIPES
    return recipes


def find(source: str) -> Recipe:
    """The recipe a text names: one of `RECIPES`, or `path.py:function`."""
    if is_source(source):
        recipe = called(load(source, "recipe"), source)
        if not isinstance(recipe, Recipe):
            raise GrowpruneError(f"{source} returned a {type(recipe).__name__}, but a recipe function returns a Recipe")
        return recipe
    task = source.partition("/")[0].partition("-")[0]
    known = _recipes_of(task) if task in TASKS else {}
    if source not in known:
        close = ", ".join(difflib.get_close_matches(source, __getattr__("RECIPES"), 3, 0.4)) or "none"
        raise GrowpruneError(
            f"there is no recipe {source!r}; close are: {close}. See `growprune list recipes`, or give path.py:function"
        )
    return known[source]()
