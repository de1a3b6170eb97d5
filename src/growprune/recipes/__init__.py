"""All recipes by name. To add one, write a function that returns a `Recipe`, and add it to RECIPES of its module.

Names are `task-data/method-sparsity-allocation[-variant]`: `classification-imagenet/cyclic-80-uniform` is a row of the
paper, and `classification-cifar10/cyclic-80-uniform` is the same on small data. MEASURED has our own result of each
recipe that was run. The recipes of a task are loaded on first use, so that a run loads only those of its own task.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from growprune.engine.override import called, is_source, load
from growprune.engine.recipe import Recipe
from growprune.errors import GrowpruneError

if TYPE_CHECKING:
    RECIPES: dict[str, Callable[[], Recipe]]
    MEASURED: dict[str, str]

TASKS = ("digits", "classification", "detection", "segmentation", "translation", "language")
"""The modules of recipes, each with those of one task in its RECIPES."""


def __getattr__(name: str) -> Any:
    if name in ("RECIPES", "MEASURED"):
        return {key: item for task in TASKS for key, item in getattr(_module(task), name, {}).items()}
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _module(task: str) -> Any:
    return importlib.import_module(f"{__name__}.{task}")


def find(source: str) -> Recipe:
    """Find a recipe by its name in `RECIPES`, or as `path.py:function`."""
    if is_source(source):
        recipe = called(load(source, "recipe"), source)
        if not isinstance(recipe, Recipe):
            raise GrowpruneError(f"{source} must return a growprune.Recipe, got {type(recipe).__name__}")
        return recipe
    task = source.partition("/")[0].partition("-")[0]
    known: dict[str, Callable[[], Recipe]] = _module(task).RECIPES if task in TASKS else {}
    if source not in known:
        close = " or ".join(difflib.get_close_matches(source, __getattr__("RECIPES"), 3, 0.4))
        raise GrowpruneError(
            f"unknown recipe {source!r}. {f'Did you mean {close}? ' if close else ''}See `growprune list recipes`, or "
            f"give path.py:function"
        )
    return known[source]()
