"""The runs of a comparison: their commands and their state."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from growprune.compare.budget import Budget, check_length, cut_as_usual, num_epochs, num_iterations_per_epoch, spend
from growprune.compare.grid import Grid, Point, points_of
from growprune.compare.parsing import LONGEST, Row
from growprune.compare.small import make_small
from growprune.engine.compatibility import check_same_recipe, check_same_work, fields_of
from growprune.engine.folder import RunFolder
from growprune.engine.override import override
from growprune.engine.recipe import Recipe, describe, own_options
from growprune.engine.source import absolute
from growprune.errors import GrowpruneError
from growprune.plan.settings import check_counts, check_sparsity
from growprune.recipes import find
from growprune.runs import Record, read_run
from growprune.runs.comparable import MAY_CHANGE, deciding, flat, say_grid
from growprune.runs.metric import in_full
from growprune.runs.record import failure_file

OWN = ("method", "options", "sparsity", "allocation", "seed")
"""Fields of the recipe that belong to rows and runs. `--set` cannot change them."""
NO_GRID: Grid = {}


@dataclass(frozen=True, eq=False)
class Job:
    """One run: a row at a sparsity, at a point of its grid, with a seed."""

    row: Row
    sparsity: float
    point: Point
    seed: int
    epochs: float
    source: str
    """The source of the recipe that all jobs are made from."""
    settings: dict[str, str]
    """Settings of this run in the recipe."""
    recipe: Recipe
    folder: Path

    @property
    def name(self) -> str:
        sparsity = f" {in_full(self.sparsity)}" if self.row.takes_sparsity else ""
        point = f" {self.point.name}" if self.point.settings else ""
        return f"{self.row.name}{sparsity}{point} seed {self.seed}"

    @property
    def cell(self) -> tuple[str, float]:
        """The line of the table that the run belongs to."""
        return self.row.name, self.sparsity

    @property
    def arguments(self) -> list[str]:
        """Arguments of `growprune` that start the run, or resume it."""
        settings = [word for key, value in self.settings.items() for word in ("--set", f"{key}={value}")]
        return ["train", self.source, "--resume", "--out", str(self.folder), *settings]

    @property
    def command(self) -> str:
        """The shell command of the run."""
        return shlex.join(["growprune", *self.arguments])

    @property
    def log(self) -> Path:
        """File with the output of the run, if it was started here."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def failure(self) -> Path:
        """File with the error of a failed run."""
        return failure_file(self.folder)

    @property
    def is_finished(self) -> bool:
        return (self.folder / "result.json").exists()

    @property
    def error(self) -> str:
        """The error of a failed run. Empty otherwise."""
        return self.failure.read_text() if self.failure.exists() and not self.is_finished else ""

    def read(self) -> Record:
        """Read the run folder. Raise if it is damaged."""
        run = read_run(self.folder)
        if run.damage:
            raise GrowpruneError(run.damage)
        return replace(run, origin={"row": self.row.name, **run.origin})

    def check_folder(self, iterations_per_epoch: int) -> None:
        """Raise if the folder has a run of another recipe, plan or model."""
        folder = RunFolder(self.folder)
        if folder.recipe.exists():
            check_same_recipe(folder, self.recipe)
            if folder.plan.exists():
                check_same_work(folder, self.recipe, iterations_per_epoch)
        elif self.is_finished:  # a result that was brought from elsewhere
            stored, wanted = flat(self.read().recipe), fields_of(self.recipe)
            for name in [name for name in wanted if name in stored and name not in MAY_CHANGE]:
                if stored[name] != wanted[name]:
                    raise GrowpruneError(
                        f"{folder.result} has {name}={stored[name]!r}, but the comparison has {wanted[name]!r} now. "
                        f"Restore it, or choose another --out"
                    )


@contextlib.contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turn an OSError into one line that names the folder and says what to do."""
    try:
        yield
    except OSError as error:
        raise GrowpruneError(
            f"cannot write to {folder} ({error.strerror or error}). Check disk space and permissions, or choose "
            f"another --out"
        ) from error


def make_jobs(
    source: str,
    rows: Sequence[Row],
    sparsities: Sequence[float],
    seeds: Sequence[int],
    budget: Budget,
    out: Path,
    settings: Mapping[str, str],
    allowed: Sequence[str] = (),
    grid: Grid = NO_GRID,
) -> list[Job]:
    """All runs, seed by seed, so that an interrupted comparison has all rows for its first seeds.

    With a grid there is one run per point. Points that give the same run of a row share one.
    """
    _check(sparsities, seeds, settings)
    found = find(source)
    base = override(found, settings)
    cells = [(row, s) for row in rows for s in (sparsities if row.takes_sparsity else [0.0])]
    made = [m for row, s in cells for m in _settle_points(base, row, s, budget, "epochs" in allowed, grid)]
    jobs = []
    for seed in seeds:
        for row, sparsity, point, own, epochs in made:
            whole = {**settings, **own, "seed": str(seed)}
            folder = out.resolve() / row.folder / in_full(sparsity) / point.folder / f"seed{seed}"
            recipe = override(found, whole)
            jobs.append(Job(row, sparsity, point, seed, epochs, absolute(source), whole, recipe, folder))
    return jobs


def _check(sparsities: Sequence[float], seeds: Sequence[int], settings: Mapping[str, str]) -> None:
    for sparsity in sparsities:
        check_sparsity(sparsity)
    for seed in seeds:
        check_counts(0, seed=seed)
    for what, values in (("--sparsities", sparsities), ("--seeds", seeds)):
        if not values or len(set(values)) < len(values):
            raise GrowpruneError(f"{what} must be one or more different values, got {list(values)}")
    for key in settings:
        if key.partition(".")[0] in OWN:
            raise GrowpruneError(f"--set {key}: rows of a comparison set it. Use --methods, --sparsities or --seeds")


def _place(row: Row, key: str, options: Sequence[str]) -> str:
    """The setting for a key of a row: an option of its method, or a field of the recipe."""
    if key in options:
        return f"options.{key}"
    if key.partition(".")[0] not in {field.name for field in fields(Recipe)}:
        method, known = row.method.rpartition(":")[2], ", ".join(options) or "none"
        raise GrowpruneError(
            f"the row {row.name!r} has an unknown key {key!r}. Options of {method} are: {known}. Or give a field of "
            f"the recipe, such as optimizer.lr"
        )
    return key


Settled = tuple[Row, float, Point, dict[str, str], float]
"""A row, a sparsity, a point, the settings for the recipe, and the number of epochs."""


def _settle_points(base: Recipe, row: Row, sparsity: float, budget: Budget, is_free: bool, grid: Grid) -> list[Settled]:
    """All points of a row's grid. Points that give the same run appear once."""
    own = _own_settings(base, row, sparsity)
    settled: dict[str, Settled] = {}
    points = points_of(grid, row, override(base, own))
    for point in points:
        try:
            _check_apart(row, own, point)
            made, epochs = _settle(base, row, sparsity, budget, is_free, own | dict(point.settings))
            run = Record(Path(), recipe=describe(override(base, made)))
        except GrowpruneError as error:
            if not grid:
                raise
            said = str(error).replace("--set ", "--tune ")  # which is how the value was given
            raise GrowpruneError(f"{row.name}, {point.name}: {said}") from error
        settled.setdefault(json.dumps(deciding(run), sort_keys=True), (row, sparsity, point, made, epochs))
    if len(points) > 1 == len(settled):
        raise GrowpruneError(
            f"--tune {say_grid(grid)}: all {len(points)} points give the same run of {row.name}, so this row would not "
            f"be tuned. Tune a setting that affects it, such as optimizer.lr, or leave the row out"
        )
    return [*settled.values()]


def _check_apart(row: Row, own: Mapping[str, str], point: Point) -> None:
    """Raise if a row sets a field that is tuned, or if its folder names are too long."""
    if both := [key for key, _ in point.settings if key in own]:
        raise GrowpruneError(f"the row sets {both[0]}, but --tune tunes it for all rows. Leave one of them out")
    if len(point.folder) > LONGEST:
        raise GrowpruneError(f"folder names can have {LONGEST} characters, got {len(point.folder)}. Tune fewer")


def _own_settings(base: Recipe, row: Row, sparsity: float) -> dict[str, str]:
    """The settings of a row in the recipe."""
    own = {"method": row.method, "options": "{}", "sparsity": repr(0.0 if row.equal else sparsity)}
    own |= {"allocation": row.allocation} if row.allocation and row.takes_sparsity else {}
    options = own_options(override(base, own).method)
    return own | {_place(row, key, options): value for key, value in row.settings}


def _settle(
    base: Recipe, row: Row, sparsity: float, budget: Budget, is_free: bool, own: dict[str, str]
) -> tuple[dict[str, str], float]:
    """Settings of a row in the recipe, and its number of epochs. If free, its own options may set the epochs."""
    begun = chosen = override(base, own)
    per_epoch = num_iterations_per_epoch(chosen)
    share = 1.0
    if row.equal:
        begun = make_small(begun, sparsity, row.equal)
        share = begun.options["small"]["flops"]
        own = own | {f"task.{name}": json.dumps(value) for name, value in begun.options["small"]["task"].items()}
        own |= {"pattern": begun.pattern}
    if "parts" not in own:
        begun = cut_as_usual(begun)

    def at(epochs: int) -> Recipe:
        return spend(begun, epochs, per_epoch)

    epochs = budget.epochs_of(begun.method, at, share)
    filled = at(epochs)
    if not is_free:
        check_length(filled, epochs, per_epoch)
    own = {key: value for key, value in own.items() if not key.startswith("options.")}
    own["options"] = json.dumps(describe(filled.options), separators=(",", ":"))
    if filled.parts != chosen.parts:
        own["parts"] = str(filled.parts)
    return own, round(num_epochs(filled, per_epoch))
