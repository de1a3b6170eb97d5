"""All recipes by name. To add one, write a function that returns a `Recipe`, and add it to RECIPES of its module.

Names are `task-data/method-sparsity-allocation[-variant]`: `classification-imagenet/cyclic-80-uniform` is a row of the
paper, `classification-cifar10/...` is the same on small data, and `classification-tiny/...` takes seconds. The recipes
of a task are loaded on first use, so that a run loads only those of its own task.
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
    """Find a recipe by its name in `RECIPES`, or as `path.py:function`."""
    if is_source(source):
        recipe = called(load(source, "recipe"), source)
        if not isinstance(recipe, Recipe):
            raise GrowpruneError(f"{source} must return a growprune.Recipe, got {type(recipe).__name__}")
        return recipe
    task = source.partition("/")[0].partition("-")[0]
    known = _recipes_of(task) if task in TASKS else {}
    if source not in known:
        close = " or ".join(difflib.get_close_matches(source, __getattr__("RECIPES"), 3, 0.4))
        raise GrowpruneError(
            f"unknown recipe {source!r}. {f'Did you mean {close}? ' if close else ''}See `growprune list recipes`, or "
            f"give path.py:function"
        )
    return known[source]()
