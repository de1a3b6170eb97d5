"""Grids of settings for `--tune`. They are the same for every row, so that all are tuned equally."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from growprune.compare.parsing import Row, split
from growprune.engine.recipe import Recipe, own_options
from growprune.errors import GrowpruneError
from growprune.plan import declaration_of
from growprune.plan.settings import is_number

Grid = Mapping[str, Sequence[str]]
"""The values to try for each setting, as typed."""

FIXED = {
    "method": "use --methods",
    "options": "name an option that all rows have, such as options.until",
    "sparsity": "use --sparsities",
    "allocation": "use --methods, as in rigl:erk",
    "seed": "use --seeds",
    "task": "all rows share task, model and data, so use --set",
}
"""Fields that a comparison does not tune, and what to do instead."""


@dataclass(frozen=True)
class Point:
    """One point of a grid. Without settings, the recipe as it is."""

    settings: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.settings)

    @property
    def folder(self) -> str:
        """Folder name of the point. Empty for the recipe as it is."""
        return re.sub(r"[^A-Za-z0-9_.=+]+", "-", self.name).strip("-.")


def parse_grid(texts: Sequence[str]) -> Grid:
    """Parse a grid: ["optimizer.lr=x1,x2"] -> {"optimizer.lr": ["x1", "x2"]}
    >>> parse_grid(["optimizer.lr=x1,x2", "lr_scaling=0,0.5"])
    {'optimizer.lr': ['x1', 'x2'], 'lr_scaling': ['0', '0.5']}
    """
    grid: dict[str, Sequence[str]] = {}
    for text in texts:
        key, sign, values = (part.strip() for part in text.partition("="))
        if not key or not sign:
            raise GrowpruneError(f"--tune must be KEY=VALUE,VALUE,..., such as optimizer.lr=x1,x1.5,x2, got {text!r}")
        if key in grid:
            raise GrowpruneError(f"--tune has {key} twice. Give all its values at once, as in {key}=x1,x2")
        grid[key] = _parse_values(text, values)
        _check_key(key)
    if texts and math.prod(map(len, grid.values())) < 2:
        raise GrowpruneError(f"--tune needs two or more points, got one: {' '.join(texts)}. Add values")
    return grid


def _parse_values(text: str, values: str) -> list[str]:
    found = [value.strip() for value in split(values)]
    if not all(found):
        raise GrowpruneError(f"--tune has an empty value, got {text!r}. Give comma-separated values")
    if len(set(found)) < len(found):
        raise GrowpruneError(f"--tune has a value twice, got {text!r}. Give each value once")
    return found


def _check_key(key: str) -> None:
    field, dot, _ = key.partition(".")
    if field in FIXED and not (field == "options" and dot):
        raise GrowpruneError(f"--tune {key}: a comparison cannot tune {field}; {FIXED[field]}")


def points_of(grid: Grid, row: Row, recipe: Recipe) -> list[Point]:
    """The points of a row's grid. `x2` means twice the value in `recipe`, the recipe of the row."""
    values = {key: [_value(key, text, row, recipe) for text in texts] for key, texts in grid.items()}
    return [Point(tuple(zip(values, point, strict=True))) for point in itertools.product(*values.values())]


def _value(key: str, text: str, row: Row, recipe: Recipe) -> str:
    own = _own_value(key, row, recipe)
    if not re.fullmatch(r"x[-+.\d].*", text):
        return text
    factor = _factor(key, text)
    if not is_number(own):
        raise GrowpruneError(
            f"--tune {key}={text}: {row.name} has {key}={own}, which is not a number to multiply. Give values instead"
        )
    product = float(f"{own * factor:.12g}")  # 0.1 * 1.5 is 0.15 to a reader
    return repr(int(product) if isinstance(own, int) and product.is_integer() else product)


def _factor(key: str, text: str) -> float:
    try:
        factor = float(text[1:])
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise GrowpruneError(f"--tune {key}: a factor must be x and a number > 0, such as x1.5, got {text}")
    return factor


def _own_value(key: str, row: Row, recipe: Recipe) -> Any:
    """The value of a recipe under a dotted name. An option that is not set has the default of its method."""
    first, _, rest = key.partition(".")
    if first == "options":
        known: Any = own_options(recipe.method)
        value = recipe.options.get(rest, _default(recipe, rest))
    else:
        known, value = (), recipe
        for name in key.split("."):
            known = [field.name for field in fields(value)] if is_dataclass(value) else ()
            value = getattr(value, name, None)
    if key.rpartition(".")[2] not in known:
        has = f"it has {', '.join(known)}" if known else "it has none"
        raise GrowpruneError(
            f"--tune {key}: the row {row.name!r} has no such setting ({has}). All rows are tuned with the same grid: "
            f"tune another setting, or leave the row out"
        )
    return value


def _default(recipe: Recipe, option: str) -> Any:
    parameter = declaration_of(recipe.method).options.get(option)
    return None if parameter is None or parameter.default is parameter.empty else parameter.default
