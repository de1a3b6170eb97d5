"""Compares methods on equal terms: `Request(...)` says what to run, and makes the table of what came of it.

`of_runs` makes the table of runs that are there already. How to use it, and the rules: docs/comparing.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from growprune.compare import table
from growprune.compare.budget import Budget, num_epochs, num_iterations_per_epoch
from growprune.compare.jobs import Job, make_jobs
from growprune.compare.parsing import parse_rows
from growprune.compare.table import Comparison
from growprune.engine.metric import in_full
from growprune.engine.override import override, parse_settings
from growprune.engine.recipe import Recipe, describe
from growprune.errors import GrowpruneError
from growprune.recipes import find
from growprune.runs import Record, find_runs
from growprune.runs.comparable import Terms, check, terms_of, with_rows

__all__ = ["Comparison", "Job", "Request", "of_runs"]

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Request:
    """What a person asks for, as typed."""

    recipes: Sequence[str]
    """The recipe that all rows are made from: one."""
    methods: str
    sparsities: str
    seeds: str
    epochs: int = 0
    """Of dense training; 0 for those of the recipe."""
    out: Path | None = None
    settings: Sequence[str] = ()
    data: str = ""
    budget_kind: str = "epochs"
    max_epochs: int = 0
    """0 for five times the epochs."""
    allow: Sequence[str] = ()

    def jobs(self) -> list[Job]:
        """Every run, after all that can be refused was."""
        if self.out is None:
            raise GrowpruneError("--out is not given: say where the runs go, such as --out runs/comparison")
        rows, source = parse_rows(self.methods), self._source
        sparsities, seeds = numbers("--sparsities", self.sparsities, float), numbers("--seeds", self.seeds, int)
        jobs = make_jobs(source, rows, sparsities, seeds, self.budget, self.out, self._settings, self.allow)
        self._check(jobs)
        for job in jobs:
            job.check_folder(self._iterations_per_epoch(job.recipe))
        return jobs

    def table(self, jobs: Sequence[Job]) -> Comparison:
        """What came of the runs so far."""
        found = [replace(job.read(), recipe=describe(job.recipe)) for job in jobs]
        differing = self._check(jobs)
        check([terms_of(run, epochs=run.final_epochs if self._is_equal else None) for run in found], self.allow)
        return table.build(
            found,
            base=self._source,
            budget=asdict(self.budget),
            planned={(job.row.name, job.sparsity): job.epochs for job in jobs},
            notes=[f"budget: {self.budget}", *differing, *self._capped(jobs)],
        )

    def _check(self, jobs: Sequence[Job]) -> list[str]:
        """Raise if rows differ in what they may not; returns what they differ in."""
        terms: dict[str, Terms] = {}
        for job in jobs:
            name = f"{job.row.name} {in_full(job.sparsity)}"
            epochs = job.epochs if self._is_equal else None
            planned = Record(job.folder, recipe=describe(job.recipe))
            terms.setdefault(name, terms_of(planned, epochs=epochs, name=name))
        return check([*terms.values()], self.allow)

    def _capped(self, jobs: Sequence[Job]) -> list[str]:
        most = self.budget.max_epochs
        rows = [job for job in jobs if job.epochs >= most and self.budget.kind == "flops"]
        return [*dict.fromkeys(f"{job.row.name} {in_full(job.sparsity)} is capped at {most} epochs" for job in rows)]

    @property
    def _is_equal(self) -> bool:
        """Whether all rows have the same epochs."""
        return self.budget_kind == "epochs"

    @cached_property
    def budget(self) -> Budget:
        epochs = self.epochs or num_epochs(self._base, self._usual_iterations_per_epoch)
        if epochs != int(epochs) or epochs < 1:
            raise GrowpruneError(f"{self._source} trains for {epochs:g} epochs: give --epochs")
        return Budget(self.budget_kind, int(epochs), self.max_epochs or 5 * int(epochs))

    def _iterations_per_epoch(self, recipe: Recipe) -> int:
        """Of a row; the data are looked at again only where a row has a task of its own."""
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
                f"--methods wants one recipe, and {len(self.recipes)} were given: name the one whose task is used"
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
                raise GrowpruneError(f"--data is {self.data}, but the task of {self._source} reads no files")
            settings["task.data"] = str(Path(self.data).resolve())
        return settings


def of_runs(paths: Sequence[Path], allow: Sequence[str] = ()) -> Comparison:
    """The table of runs that are there: folders of runs, folders with some below, or result.json files."""
    if missing := [path for path in paths if not path.exists()]:
        raise GrowpruneError(f"there is no {missing[0]}: give folders of runs, or a recipe with --methods")
    if not (found := with_rows(find_runs(paths), allow)):
        raise GrowpruneError("there is nothing to compare: give folders of runs, or a recipe with --methods")
    if damaged := [run.damage for run in found if run.damage]:
        raise GrowpruneError(damaged[0])
    differing = check([terms_of(run, epochs=run.final_epochs) for run in found if run.recipe], allow)
    _check_apart(found)
    return table.build(found, notes=differing)


def _check_apart(runs: Sequence[Record]) -> None:
    """Raise if two runs are of one row and seed."""
    seen: dict[tuple[str, float, int], Record] = {}
    for run in runs:
        if (other := seen.setdefault((run.row, run.sparsity, run.seed), run)) is not run:
            raise GrowpruneError(f"{other.folder} and {run.folder} are the same row and seed: leave one of them out")


def numbers(what: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    """ "0,1,2" -> [0, 1, 2]"""
    try:
        return [kind(item) for item in text.split(",") if item.strip()]
    except ValueError as error:
        wanted = "whole numbers" if kind is int else "numbers"
        raise GrowpruneError(f"{what} is {text!r}, but wants {wanted} with commas between them") from error
