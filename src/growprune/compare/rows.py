"""Rows of a comparison, and the grid that each is tuned over, as typed; and what a row trains.

A row is a method, an allocation and options. It trains for as many epochs as the budget says, with the options that use
exactly those. Small dense models are as wide as their row says.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from growprune.engine.cost import estimate
from growprune.engine.override import absolute, find_method, is_source
from growprune.engine.recipe import Recipe, own_options
from growprune.errors import GrowpruneError, shorten
from growprune.masks.allocation import ALLOCATIONS
from growprune.masks.partition import PARTS, Partition
from growprune.methods import GROWING, METHODS, dense
from growprune.plan import Plan, declaration_of, fill_lengths, plan_length
from growprune.plan.settings import check_counts, is_number, one_of
from growprune.runs.record import DENSE, EQUAL, SMALL_DENSE, small_name
from growprune.sparse.flops import Flops, count_flops
from growprune.sparse.model import SparseModel
from growprune.tasks.task import Task

OWN = ("method", "options", "sparsity", "allocation", "seed")
"""Fields of the recipe that belong to rows and runs. `--set`, `--tune` and settings of rows cannot change them."""
INSTEAD = "Use --methods, as in 'rigl:erk every=5', --sparsities or --seeds"
CONTROLS = ("start", "peak")
"""Controls: the same plan without growing, from its density at the start or at its peak."""
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
    parts = [part.strip() for part in split(text)]
    texts = dict.fromkeys(name for part in parts for name in (METHODS if part == "all" else (part,)) if name)
    rows = []
    for row in map(_parse, texts):
        rows.append(row)
        control = declaration_of(row.method).control if with_controls else None
        if control is not None and control not in dict(row.settings):
            rows += [replace(row, settings=(*row.settings, (control, kind))) for kind in CONTROLS]
    if not rows:
        raise GrowpruneError(f"--methods must be one or more rows, such as dense,rigl:erk,gmp, got {text!r}")
    rows = list(dict.fromkeys(rows))
    folders: dict[str, Row] = {}
    for row in rows:
        if len(row.folder) > LONGEST:
            raise GrowpruneError(
                f"the row {shorten(row.name, 100)!r} has a name of {len(row.folder)} characters, but folder names can "
                f"have {LONGEST}. Leave options out, or write a method with these options as defaults"
            )
        if (other := folders.setdefault(row.folder, row)) != row:
            raise GrowpruneError(f"the rows {other.name!r} and {row.name!r} would share a folder. Give different names")
    return rows


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
    """Parse a row: rigl, rigl:erk, path.py:function, path.py:function:erk or small_dense:flops, and key=value pairs."""
    path, colon, rest = text.rpartition(".py:")  # a path may have spaces
    head, *words = f"{colon}{rest}".split()
    head = path + head
    for word in words:
        if word.find("=") < 1:
            raise GrowpruneError(f"the row {text!r} must be a method and key=value pairs, got {word!r}")
    settings = tuple((key, value) for key, _, value in (word.partition("=") for word in words))
    keys = [key for key, _ in settings]
    for key in keys:
        if key.partition(".")[0] in OWN:
            raise GrowpruneError(f"the row {text!r} cannot set {key}. {INSTEAD}")
        if keys.count(key) > 1:
            raise GrowpruneError(f"the row {text!r} has {key} twice. Leave one of them out")
    if head.partition(":")[0] == SMALL_DENSE:
        if (equal := head.partition(":")[2] or EQUAL[0]) not in EQUAL:
            known = " or ".join(f"{SMALL_DENSE}:{each}" for each in EQUAL)
            raise GrowpruneError(f"the row must be {known}, got {head!r}")
        return Row(DENSE, dense, "", settings, equal)
    source, colon, allocation = head.rpartition(":")
    has_allocation = colon and not source.endswith(".py")
    source = source if has_allocation else head
    method = find_method(source)
    allocation = allocation if has_allocation else declaration_of(method).allocation
    if allocation not in ALLOCATIONS:
        raise GrowpruneError(
            f"the allocation of a row must be one of {', '.join(ALLOCATIONS)}, got {allocation!r} in {head!r}"
        )
    return Row(absolute(source) if is_source(source) else source, method, allocation, settings)


# The grid of --tune

Grid = Mapping[str, Sequence[str]]
"""The values to try for each setting, as typed."""


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
        field, dot, _ = key.partition(".")
        if field == "task":
            raise GrowpruneError(f"--tune {key}: all rows share task, model and data. Use --set")
        if field in OWN and not (field == "options" and dot):
            raise GrowpruneError(f"--tune {key}: it belongs to rows. {INSTEAD}, or tune an option, as in options.until")
        grid[key] = found = [value.strip() for value in split(values)]
        if not all(found):
            raise GrowpruneError(f"--tune has an empty value, got {text!r}. Give comma-separated values")
        if len(set(found)) < len(found):
            raise GrowpruneError(f"--tune has a value twice, got {text!r}. Give each value once")
        folders = {Point(((key, value),)).folder: value for value in found}
        if lost := set(found) - set(folders.values()):
            raise GrowpruneError(
                f"--tune {key}: the folder of {lost.pop()!r} would be that of another value too. Leave one out"
            )
    if texts and math.prod(map(len, grid.values())) < 2:
        raise GrowpruneError(f"--tune needs two or more points, got one: {' '.join(texts)}. Add values")
    return grid


def points_of(grid: Grid, row: Row, recipe: Recipe) -> list[Point]:
    """The points of a row's grid. `x2` means twice the value in `recipe`, the recipe of the row."""
    values = {key: [_value(key, text, row, recipe) for text in texts] for key, texts in grid.items()}
    return [Point(tuple(zip(values, point, strict=True))) for point in itertools.product(*values.values())]


def _value(key: str, text: str, row: Row, recipe: Recipe) -> str:
    """A value of a grid for a setting of the recipe, under its dotted name."""
    first, _, rest = key.partition(".")
    if first == "options":  # one that is not set has the default of the method
        known: Any = own_options(recipe.method)
        parameter = declaration_of(recipe.method).options.get(rest)
        default = None if parameter is None or parameter.default is parameter.empty else parameter.default
        own: Any = recipe.options.get(rest, default)
    else:
        known, own = (), recipe
        for name in key.split("."):
            known = [field.name for field in fields(own)] if is_dataclass(own) else ()
            own = getattr(own, name, None)
    if key.rpartition(".")[2] not in known:
        has = f"it has {', '.join(known)}" if known else "it has none"
        raise GrowpruneError(
            f"--tune {key}: the row {row.name!r} has no such setting ({has}). All rows are tuned with the same grid: "
            f"tune another setting, or leave the row out"
        )
    if not re.fullmatch(r"x[-+.\d].*", text):
        return text
    try:
        factor = float(text[1:])
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise GrowpruneError(f"--tune {key}: a factor must be x and a number > 0, such as x1.5, got {text}")
    if not is_number(own):
        raise GrowpruneError(
            f"--tune {key}={text}: {row.name} has {key}={own}, which is not a number to multiply. Give values instead"
        )
    product = float(f"{own * factor:.12g}")  # 0.1 * 1.5 is 0.15 to a reader
    return repr(int(product) if isinstance(own, int) and product.is_integer() else product)


PAPER_RATIO = 4
"""Training length of the GaP methods in the paper, about, as a multiple of dense."""


@dataclass(frozen=True)
class Budget:
    kind: str
    epochs: int
    """Epochs of dense training."""
    max_epochs: int
    """Limit of every row with equal FLOPs."""

    def __post_init__(self) -> None:
        one_of("--budget", self.kind, ("epochs", "flops", "paper"))
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
            return self.epochs * (PAPER_RATIO if method in GROWING else 1)
        if self.kind == "flops":

            def is_enough(epochs: int) -> bool:
                with contextlib.suppress(GrowpruneError):
                    at(epochs)
                    return True
                return False

            at(self.max_epochs)  # raises errors that do not depend on the number of epochs
            known = range(self.epochs, self.max_epochs)  # a method may need some, such as one per part
            least = self.epochs + bisect.bisect_left(known, True, key=is_enough)
            target = round(3 * estimate(at(least)).dense_flops / share * self.epochs)
            return nearest(lambda epochs: estimate(at(epochs)).training_flops, target, least, self.max_epochs)
        return self.epochs


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
        return replace(recipe, options={**lengths, **recipe.options})
    branches = 1
    if about.length == "steps * epochs + finetune":
        step = {"steps": 1, "epochs": 1, "finetune": 0}
        branches = round(num_epochs(replace(recipe, options={**recipe.options, **step}), 1, S))
    lengths = fill_lengths(recipe.method, recipe.options, epochs, parts=len(S), branches=branches)
    needed = lengths.get("steps", 0) * branches * lengths.get("epochs", 0)
    if needed > epochs:
        raise GrowpruneError(
            f"{recipe.method.__name__} needs {needed} epochs for {lengths['steps']} steps, but the budget is {epochs}. "
            f"Increase --epochs, or use fewer parts with --set parts=contiguous(2)"
        )
    return replace(recipe, options={**lengths, **recipe.options})


def num_epochs(recipe: Recipe, iterations_per_epoch: int, S: Partition | None = None) -> float:
    """Epochs of all phases and all branches, as the paper counts them."""
    plan = recipe.plan_over(parts_of(recipe) if S is None else S, iterations_per_epoch)
    return plan_length(plan, iterations_per_epoch) / iterations_per_epoch


def parts_of(recipe: Recipe, model: nn.Module | None = None) -> Partition:
    """The parts of the task's model, which is built if it is not given."""
    model = recipe.shapes() if model is None else model
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
    of = operator.attrgetter("flops.dense" if equal == "flops" else "weights")
    target = full.flops.at(dict.fromkeys(full.names, density)) if equal == "flops" else density * full.weights
    tasks = recipe.task.narrower()
    size_at = functools.cache(lambda index: size_of(recipe, tasks[index]))
    above = bisect.bisect_left(range(len(tasks) - 1), target, key=lambda index: of(size_at(index)))
    nearest_index = min((max(0, above - 1), above), key=lambda index: abs(of(size_at(index)) - target))
    task, size = tasks[nearest_index], size_at(nearest_index)  # of two equally near, the narrower
    small = {"equal": equal, "sparsity": sparsity, "task": changed(recipe.task, task), "of": changed(task, recipe.task)}
    shares = {"weights": size.weights / full.weights, "flops": size.flops.dense / full.flops.dense}
    small |= {"target": target / of(full), **shares}
    # a pattern of blocks, which may not fit the narrow layers, means nothing to a dense model
    return replace(recipe, task=task, pattern="unstructured", options={**recipe.options, "small": small})


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
