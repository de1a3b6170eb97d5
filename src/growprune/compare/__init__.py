"""Compares methods on equal terms: `Request(...)` describes the runs, and makes the table of their results.

`of_runs` makes the table of existing runs. Usage and rules: docs/comparing.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from growprune.compare import choice
from growprune.compare.budget import Budget, num_epochs, num_iterations_per_epoch
from growprune.compare.comparison import Comparison
from growprune.compare.grid import Grid, parse_grid
from growprune.compare.jobs import Job, make_jobs
from growprune.compare.parsing import parse_rows
from growprune.engine.override import override, parse_settings
from growprune.engine.recipe import Recipe, describe
from growprune.errors import GrowpruneError
from growprune.recipes import find
from growprune.runs import Record, find_runs
from growprune.runs.comparable import Terms, check, terms_of
from growprune.runs.metric import in_full
from growprune.runs.table import check_rows, rows_of, without_tried

__all__ = ["Comparison", "Job", "Request", "of_runs"]

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Request:
    """The arguments of `growprune compare`, as typed."""

    recipes: Sequence[str]
    """The recipe that all rows are made from. Must be one."""
    methods: str
    sparsities: str
    seeds: str
    epochs: int = 0
    """Epochs of dense training; 0 for those of the recipe."""
    out: Path | None = None
    settings: Sequence[str] = ()
    data: str = ""
    budget_kind: str = "epochs"
    max_epochs: int = 0
    """0 for five times the epochs."""
    allow: Sequence[str] = ()
    tune: Sequence[str] = ()
    """Grid to tune every row with, such as ["optimizer.lr=x1,x2"]. Empty: no tuning."""

    def jobs(self) -> list[Job]:
        """Every run that is known so far. Raise if the request is invalid.

        For tuned rows, these are the points of the grid with the first seed, and, once those are done, the other seeds
        of the best point.
        """
        jobs = self._all_jobs()
        if self._grid:
            known = {job for trials in self._trials(jobs).values() for job in self._due(trials, jobs)}
            jobs = [job for job in jobs if job in known]
        for job in jobs:
            job.check_folder(self._iterations_per_epoch(job.recipe))
        return jobs

    def is_tuned(self, jobs: Sequence[Job]) -> bool:
        """True if every row is tuned, so that no more jobs will follow."""
        return not self._grid or all(map(choice.is_tuned, self._trials(jobs).values()))

    def write_choices(self, jobs: Sequence[Job]) -> None:
        """Write tuning.json beside the runs of each row, with the choice so far."""
        for trials in self._trials(jobs).values() if self._grid else ():
            choice.write(trials, self._grid)

    def _all_jobs(self) -> list[Job]:
        """Every possible run: all points with all seeds."""
        if self.out is None:
            raise GrowpruneError("--out is missing. Give a folder for the runs, such as --out runs/comparison")
        rows, source = parse_rows(self.methods), self._source
        sparsities, seeds = numbers("--sparsities", self.sparsities, float), numbers("--seeds", self.seeds, int)
        settings, grid = self._settings, self._grid
        jobs = make_jobs(source, rows, sparsities, seeds, self.budget, self.out, settings, self.allow, grid)
        self._check(jobs)
        return jobs

    def _trials(self, jobs: Sequence[Job]) -> dict[tuple[str, float], list[Job]]:
        """For each line of the table, the tuning runs: those with the first seed."""
        trials: dict[tuple[str, float], list[Job]] = {}
        for job in [job for job in jobs if job.seed == jobs[0].seed]:
            trials.setdefault(job.cell, []).append(job)
        return trials

    def _due(self, trials: Sequence[Job], jobs: Sequence[Job]) -> list[Job]:
        """The runs of a line of the table that can start now."""
        chosen, first = choice.chosen_of(trials, self._grid), trials[0]
        others = [job for job in jobs if job.cell == first.cell and job.seed != first.seed]
        return [*trials, *(job for job in others if chosen is not None and job.point == chosen.point)]

    @cached_property
    def _grid(self) -> Grid:
        grid = parse_grid(self.tune)
        if grid and not self._base.task.has_validation_data:
            name = type(self._base.task).__name__
            raise GrowpruneError(f"--tune needs validation data, but the task {name} has none. Leave --tune out")
        return grid

    def table(self, jobs: Sequence[Job]) -> Comparison:
        """The table of the runs so far."""
        found = without_tried([replace(job.read(), recipe=describe(job.recipe)) for job in jobs])
        differing = self._check(jobs)
        rows = rows_of(found, self.allow)
        check_rows(rows, self.allow, with_epochs=self._is_equal)
        return Comparison(
            rows,
            base=self._source,
            budget=asdict(self.budget),
            planned={job.folder: job.epochs for job in jobs},
            remarks=[f"budget: {self.budget}", *differing, *self._capped(jobs)],
        )

    def _check(self, jobs: Sequence[Job]) -> list[str]:
        """Raise if rows differ in fields that must be equal. Return the allowed differences."""
        terms: dict[str, Terms] = {}
        for job in jobs:
            name = f"{job.row.name} {in_full(job.sparsity)}"
            epochs = job.epochs if self._is_equal else None
            planned = Record(job.folder, recipe=describe(job.recipe), tuning={"grid": self._grid} if self._grid else {})
            terms.setdefault(name, terms_of(planned, name, epochs=epochs))
        return check([*terms.values()], self.allow)

    def _capped(self, jobs: Sequence[Job]) -> list[str]:
        most = self.budget.max_epochs
        rows = [job for job in jobs if job.epochs >= most and self.budget.kind == "flops"]
        return [*dict.fromkeys(f"{job.row.name} {in_full(job.sparsity)} is capped at {most} epochs" for job in rows)]

    @property
    def _is_equal(self) -> bool:
        """True if all rows have the same epochs."""
        return self.budget_kind == "epochs"

    @cached_property
    def budget(self) -> Budget:
        epochs = self.epochs or num_epochs(self._base, self._usual_iterations_per_epoch)
        if epochs != int(epochs) or epochs < 1:
            raise GrowpruneError(f"epochs must be an integer >= 1, but {self._source} has {epochs:g}. Give --epochs")
        return Budget(self.budget_kind, int(epochs), self.max_epochs or 5 * int(epochs))

    def _iterations_per_epoch(self, recipe: Recipe) -> int:
        """Iterations per epoch of a row. Data is read again only if the row has a task of its own."""
        base = self._base
        is_same = (recipe.task, recipe.accumulate) == (base.task, base.accumulate)
        return self._usual_iterations_per_epoch if is_same else num_iterations_per_epoch(recipe)

    @cached_property
    def _usual_iterations_per_epoch(self) -> int:
        return num_iterations_per_epoch(self._base)

    @property
    def _source(self) -> str:
        if len(self.recipes) != 1:
            raise GrowpruneError(
                f"--methods needs exactly one recipe, got {len(self.recipes)}. Give the one whose task is used"
            )
        return self.recipes[0]

    @cached_property
    def _base(self) -> Recipe:
        return override(find(self._source), self._settings)

    @cached_property
    def _settings(self) -> dict[str, str]:
        settings = parse_settings([*self.settings])
        if self.data:
            if not find(self._source).task.reads_files:
                raise GrowpruneError(f"--data is not used by the task of {self._source}; got {self.data}. Leave it out")
            settings["task.data"] = str(Path(self.data).resolve())
        return settings


def of_runs(paths: Sequence[Path], allow: Sequence[str] = ()) -> Comparison:
    """The table of existing runs: run folders, folders of runs, or result.json files."""
    if not (found := without_tried(find_runs(paths))):
        raise GrowpruneError("nothing to compare. Give run folders, or a recipe with --methods")
    if damaged := [run.damage for run in found if run.damage]:
        raise GrowpruneError(damaged[0])
    rows = rows_of(found, allow)
    return Comparison(rows, remarks=check_rows(rows, allow))


def numbers(what: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    """Parse numbers: "0,1,2" -> [0, 1, 2]"""
    try:
        return [kind(item) for item in text.split(",") if item.strip()]
    except ValueError as error:
        wanted = "integers" if kind is int else "numbers"
        raise GrowpruneError(f"{what} must be comma-separated {wanted}, got {text!r}") from error
