"""Parses the rows of a comparison (a method, an allocation and options) and the grid that every row is tuned over."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from growprune.engine.override import absolute, find_method, is_source
from growprune.engine.recipe import Recipe, own_options
from growprune.errors import GrowpruneError, shorten
from growprune.masks.allocation import ALLOCATIONS
from growprune.methods import METHODS, dense
from growprune.plan import Plan, declaration_of
from growprune.plan.settings import is_number
from growprune.runs.record import DENSE, EQUAL, SMALL_DENSE, small_name

CONTROLS = ("start", "peak")
"""Controls: the same plan without growing, from its density at the start or at its peak."""
ELSEWHERE = {
    "method": "first in the row",
    "allocation": "after the method, as in rigl:erk",
    "sparsity": "with --sparsities",
    "seed": "with --seeds",
    "options": "as key=value for each",
}
"""Fields that a row cannot set with key=value, and where to give them instead."""
LONGEST = 255
"""Maximum length of a folder name."""


@dataclass(frozen=True)
class Row:
    """One line of the table at one sparsity."""

    source: str
    """Name of the method, or path.py:function."""
    method: Callable[..., Plan]
    allocation: str
    settings: tuple[tuple[str, str], ...] = ()
    """Options of the method, or fields of the recipe, as typed."""
    equal: str = ""
    """For a small dense model: the quantity in which it equals a sparse one, one of `EQUAL`."""

    @property
    def takes_sparsity(self) -> bool:
        """True if its method takes a sparsity. Others, such as dense, run once and have no allocation."""
        return bool(self.equal) or "sparsity" in declaration_of(self.method).options

    @property
    def name(self) -> str:
        """Name of the row in the table."""
        method = small_name(self.equal) or self.source.rpartition(":")[2]
        allocated = f"{method}:{self.allocation}" if self.allocation and self.takes_sparsity else method
        return " ".join([allocated, *(f"{key}={value}" for key, value in self.settings)])

    @property
    def folder(self) -> str:
        """Folder name of the row."""
        return re.sub(r"[^A-Za-z0-9_.=]+", "-", self.name).strip("-.")


def parse_rows(text: str, *, with_controls: bool = False) -> list[Row]:
    """Parse the rows of `--methods`, each once, in the given order.

    Args:
        with_controls: add controls to each row whose method declares a parameter for them.

    >>> [row.name for row in parse_rows("dense,rigl,gmp:uniform until=0.5")]
    ['dense', 'rigl:erk', 'gmp:uniform until=0.5']
    """
    texts = [part.strip() for part in split(text)]
    texts = [name for part in texts for name in (METHODS if part == "all" else (part,)) if name]
    rows = list(dict.fromkeys(map(_parse, dict.fromkeys(texts))))
    if with_controls:
        rows = list(dict.fromkeys(each for row in rows for each in _and_controls(row)))
    if not rows:
        raise GrowpruneError(f"--methods must be one or more rows, such as dense,rigl:erk,gmp, got {text!r}")
    _check_names(rows)
    return rows


def _and_controls(row: Row) -> list[Row]:
    """A row and its controls, if its method has any: the same method without growing."""
    control = declaration_of(row.method).control
    if control is None or control in dict(row.settings):
        return [row]
    return [row, *(replace(row, settings=(*row.settings, (control, kind))) for kind in CONTROLS)]


def split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[({") - (letter in "])}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _parse(text: str) -> Row:
    head, *words = _words(text)
    for word in words:
        if word.find("=") < 1:
            raise GrowpruneError(f"the row {text!r} must be a method and key=value pairs, got {word!r}")
    settings = tuple((key, value) for key, _, value in (word.partition("=") for word in words))
    _check_keys(text, [key for key, _ in settings])
    if head.partition(":")[0] == SMALL_DENSE:
        return Row(DENSE, dense, "", settings, _parse_equal(head))
    return _parse_method(head, settings)


def _parse_equal(head: str) -> str:
    """Parse small_dense or small_dense:flops."""
    equal = head.partition(":")[2] or EQUAL[0]
    if equal not in EQUAL:
        known = " or ".join(f"{SMALL_DENSE}:{each}" for each in EQUAL)
        raise GrowpruneError(f"the row must be {known}, got {head!r}")
    return equal


def _words(text: str) -> list[str]:
    """Split at spaces, except in the path of a file."""
    path, colon, rest = text.rpartition(".py:")
    head, *words = f"{colon}{rest}".split()
    return [path + head, *words]


def _check_keys(text: str, keys: Sequence[str]) -> None:
    for key in keys:
        if (field := key.partition(".")[0]) in ELSEWHERE:
            raise GrowpruneError(f"the row {text!r} cannot set {key}. Give it {ELSEWHERE[field]}")
        if keys.count(key) > 1:
            raise GrowpruneError(f"the row {text!r} has {key} twice. Leave one of them out")


def _parse_method(head: str, settings: tuple[tuple[str, str], ...]) -> Row:
    """Parse rigl, rigl:erk, path.py:function or path.py:function:erk."""
    source, colon, allocation = head.rpartition(":")
    if not colon or source.endswith(".py"):
        source, allocation = head, ""
    method = find_method(source)
    allocation = allocation if source != head else declaration_of(method).allocation
    if allocation not in ALLOCATIONS:
        raise GrowpruneError(
            f"the allocation of a row must be one of {', '.join(ALLOCATIONS)}, got {allocation!r} in {head!r}"
        )
    return Row(absolute(source) if is_source(source) else source, method, allocation, settings)


def _check_names(rows: Sequence[Row]) -> None:
    folders: dict[str, Row] = {}
    for row in rows:
        if len(row.folder) > LONGEST:
            raise GrowpruneError(
                f"the row {shorten(row.name, 100)!r} has a name of {len(row.folder)} characters, but folder names can "
                f"have {LONGEST}. Leave options out, or write a method with these options as defaults"
            )
        if (other := folders.setdefault(row.folder, row)) != row:
            raise GrowpruneError(f"the rows {other.name!r} and {row.name!r} would share a folder. Give different names")


# The grid of --tune

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
