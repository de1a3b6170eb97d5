"""Every recipe by its name. To add one: write a function that returns a `Recipe`, add its line here.

Names read `task-data/method-sparsity-allocation[-variant]`: `classification-imagenet/cyclic-80-uniform` is a row of the
paper, `classification-cifar10/...` the same in small, `classification-tiny/...` in seconds.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from growprune.engine.recipe import Recipe
from growprune.engine.source import called, is_source, load
from growprune.errors import GrowpruneError
from growprune.recipes import classification, detection, digits, language, segmentation, translation

RECIPES: dict[str, Callable[[], Recipe]] = {
    "digits/dense": digits.dense,
    "digits/cyclic-90": digits.cyclic_90,
    "digits/cyclic-90-global": digits.cyclic_90_global,
    "digits/gradual-90": digits.gradual_90,
    "digits/parallel-90": digits.parallel_90,
    "digits/random-90": digits.random_90,
    "digits/one-shot-90": digits.one_shot_90,
    "digits/tiny": digits.tiny,
    **classification.RECIPES,
    **detection.RECIPES,
    **segmentation.RECIPES,
    **translation.RECIPES,
    **language.RECIPES,
}


def find(source: str) -> Recipe:
    """The recipe a text names: one of `RECIPES`, or `path.py:function`."""
    if source in RECIPES:
        return RECIPES[source]()
    if not is_source(source):
        close = ", ".join(difflib.get_close_matches(source, RECIPES, 3, 0.4)) or "none"
        raise GrowpruneError(
            f"there is no recipe {source!r}; close are: {close}. See `growprune list recipes`, or give path.py:function"
        )
    recipe = called(load(source, "recipe"), source)
    if not isinstance(recipe, Recipe):
        raise GrowpruneError(f"{source} returned a {type(recipe).__name__}, but a recipe function returns a Recipe")
    return recipe
