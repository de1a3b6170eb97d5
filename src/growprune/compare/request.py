"""What `growprune compare` was asked for: every run, with its recipe, before any of them starts."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

from torch import nn

from growprune.compare.jobs import EARLIER, Job
from growprune.compare.rows import (
    INSTEAD,
    LONGEST,
    OWN,
    Budget,
    Grid,
    Point,
    Row,
    cut_as_usual,
    make_small,
    num_epochs,
    parse_grid,
    parse_rows,
    parts_of,
    points_of,
    spend,
)
from growprune.engine.folder import holding
from growprune.engine.override import absolute, digests, override, parse_settings, with_places
from growprune.engine.recipe import Recipe, describe, own_options
from growprune.errors import GrowpruneError
from growprune.files import disk
from growprune.files.disk import writing_to
from growprune.plan.settings import check_counts, check_sparsity
from growprune.recipes import find
from growprune.runs import Record, find_runs
from growprune.runs.comparison import Comparison
from growprune.runs.record import TUNING, in_full
from growprune.runs.result import Json, Metric
from growprune.runs.table import FAILED, check, check_rows, deciding, rows_of, say_grid, terms_of, without_tried

Number = TypeVar("Number", int, float)
Cell = tuple[str, float]
"""A line of the table: the name of its row, and its sparsity."""
Settled = tuple[Row, float, Point, Recipe, dict[str, str], float]
"""A run without its seed: row, sparsity, point, recipe, the settings that make it, and epochs."""


@dataclass(frozen=True)
class Request:
    """The arguments of `growprune compare`, parsed."""

    source: str
    """The recipe that all rows are made from, as typed."""
    base: Recipe
    """That recipe, with `settings`."""
    settings: Mapping[str, str]
    rows: Sequence[Row]
    sparsities: Sequence[float]
    seeds: Sequence[int]
    out: Path
    budget: Budget
    allow: Sequence[str]
    """Settings that may differ between rows."""
    grid: Grid
    """What every row is tuned over. Empty: no tuning."""
    iterations_per_epoch: int

    @classmethod
    def parse(
        cls,
        recipes: Sequence[str],
        methods: str,
        sparsities: str,
        seeds: str,
        epochs: int = 0,
        out: Path | None = None,
        settings: Sequence[str] = (),
        data: str = "",
        budget_kind: str = "epochs",
        max_epochs: int = 0,
        allow: Sequence[str] = (),
        tune: Sequence[str] = (),
        *,
        with_controls: bool = False,
    ) -> Request:
        """Parse what was typed. Raise if it is invalid.

        Args:
            recipes: the recipe that all rows are made from; must be one.
            epochs: of dense training; 0 for those of the recipe.
            max_epochs: 0 for five times the epochs.
            tune: grid to tune every row with, such as ["optimizer.lr=x1,x2"].
            with_controls: add controls, for methods that have any.
        """
        if len(recipes) != 1:
            raise GrowpruneError(
                f"--methods needs exactly one recipe, got {len(recipes)}. Give the one whose task is used"
            )
        if out is None:
            raise GrowpruneError("--out is missing. Give a folder for the runs, such as --out runs/comparison")
        source, found = recipes[0], find(recipes[0])
        given = with_places(parse_settings(settings), found, data)
        for key in given:
            if key.partition(".")[0] in OWN:
                raise GrowpruneError(f"--set {key}: rows of a comparison set it. {INSTEAD}")
        base = override(found, given) if given else found
        rows = parse_rows(methods, with_controls=with_controls)
        of_sparsity, of_seed = _numbers("--sparsities", sparsities, float), _numbers("--seeds", seeds, int)
        for sparsity in of_sparsity:
            check_sparsity(sparsity)
        check_counts(0, **{"seed": min(of_seed)})
        grid = parse_grid(tune)
        if grid and not base.task.has_validation_data:
            name = type(base.task).__name__
            raise GrowpruneError(f"--tune needs validation data, but the task {name} has none. Leave --tune out")
        per_epoch = base.num_iterations_per_epoch()
        length = epochs or num_epochs(base, per_epoch)
        if length != int(length) or length < 1:
            raise GrowpruneError(f"epochs must be an integer >= 1, but {source} has {length:g}. Give --epochs")
        budget = Budget(budget_kind, int(length), max_epochs or 5 * int(length))
        return cls(
            source, base, given, rows, of_sparsity, of_seed, out.resolve(), budget, tuple(allow), grid, per_epoch
        )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the output folder, so that no other comparison writes there.

        It is made only if the request is valid.
        """
        self._check_terms()
        with writing_to(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        with holding(self.out, 0, "by another growprune compare. Wait for it, or choose another --out"):
            yield

    # The runs

    @functools.cached_property
    def every_job(self) -> list[Job]:
        """Every possible run, seed by seed, so that an interrupted comparison has all rows for its first seeds.

        With a grid there is one for each point of it. Points that give the same run of a row share one.
        """
        jobs = []
        source = absolute(self.source)
        cells = [(row, s) for row in self.rows for s in (self.sparsities if row.takes_sparsity else [0.0])]
        settled = [made for cell in cells for made in self._settle(*cell)]
        files = {row.source: digests(source, row.source) for row in self.rows}
        for seed in self.seeds:
            for row, sparsity, point, recipe, settings, epochs in settled:
                folder = self.out / row.folder / in_full(sparsity) / point.folder / f"seed{seed}"
                made, whole = replace(recipe, seed=seed), {**settings, "seed": str(seed)}
                jobs.append(Job(row, sparsity, point, seed, epochs, made, source, whole, files[row.source], folder))
        return jobs

    def jobs(self) -> list[Job]:
        """Every run that is known so far. Raise if runs would not be comparable, or if a folder has another run.

        For tuned rows, these are the points of the grid with the first seed, and, once those are done, the other seeds
        of the best point.
        """
        self._check_terms()
        jobs = self.every_job
        if self.grid:
            chosen = {cell: self._try(trials)["folder"] for cell, trials in self._trials().items()}
            jobs = [job for job in jobs if job.seed == self.seeds[0] or job.point.folder == chosen[job.cell]]
        for job in jobs:
            if not job.changed_files():
                job.check_folder(self._per_epoch(job.recipe))
        return jobs

    def prepare(self, jobs: Sequence[Job]) -> list[str]:
        """Write recipe.json of each run. Put aside runs of other code of the user, and say so."""
        changed = {job: names for job in jobs if (names := job.changed_files())}
        for job in changed:
            job.put_aside(self.out)
        for job in jobs:
            job.write_recipe()
        said = ", ".join(dict.fromkeys(name for found in changed.values() for name in found))
        place = self.out / EARLIER
        again = f"{said} changed since these runs: {len(changed)} run again. The old ones are in {place}"
        return [again] if changed else []

    def _settle(self, row: Row, sparsity: float) -> list[Settled]:
        """The recipe of a row at each point of the grid, the settings that make it, and its number of epochs."""
        own = {"method": row.source, "options": "{}", "sparsity": repr(0.0 if row.equal else sparsity)}
        own |= {"allocation": row.allocation} if row.allocation and row.takes_sparsity else {}
        known = own_options(row.method)
        for key, value in row.settings:
            if key not in known and key.partition(".")[0] not in {field.name for field in fields(Recipe)}:
                method = row.source.rpartition(":")[2]
                raise GrowpruneError(
                    f"the row {row.name!r} has an unknown key {key!r}. Options of {method} are: "
                    f"{', '.join(known) or 'none'}. Or give a field of the recipe, such as optimizer.lr"
                )
            own[f"options.{key}" if key in known else key] = value
        points = points_of(self.grid, row, override(self.base, own)) if self.grid else [Point()]
        settled: dict[str, Settled] = {}
        for point in points:
            try:
                if both := [key for key, _ in point.settings if key in own]:
                    raise GrowpruneError(
                        f"the row sets {both[0]}, but --tune tunes it for all rows. Leave one of them out"
                    )
                if len(point.folder) > LONGEST:
                    raise GrowpruneError(
                        f"folder names can have {LONGEST} characters, got {len(point.folder)}. Tune fewer"
                    )
                made = self._settle_point(row, sparsity, own | dict(point.settings))
            except GrowpruneError as error:
                if not self.grid:
                    raise
                said = str(error).replace("--set ", "--tune ")  # which is how the value was given
                raise GrowpruneError(f"{row.name}, {point.name}: {said}") from error
            alike = json.dumps(deciding(Record(Path(), recipe=describe(made[0]))), sort_keys=True) if self.grid else ""
            settled.setdefault(alike, (row, sparsity, point, *made))
        if len(points) > 1 == len(settled):
            raise GrowpruneError(
                f"--tune {say_grid(self.grid)}: all {len(points)} points give the same run of {row.name}, so this row "
                f"would not be tuned. Tune a setting that affects it, such as optimizer.lr, or leave the row out"
            )
        return [*settled.values()]

    def _settle_point(self, row: Row, sparsity: float, own: dict[str, str]) -> tuple[Recipe, dict[str, str], float]:
        begun = chosen = override(self.base, own)
        per_epoch = self._per_epoch(chosen)
        share = 1.0
        if row.equal:
            begun = make_small(begun, sparsity, row.equal)
            share = begun.options["small"]["flops"]
            own |= {f"task.{name}": json.dumps(value) for name, value in begun.options["small"]["task"].items()}
            own |= {"pattern": begun.pattern}
        if "parts" not in own:
            begun = cut_as_usual(begun)
        S = parts_of(begun, self._model if begun.task == self.base.task else None)
        at = functools.cache(lambda epochs: spend(begun, epochs, per_epoch, S))
        epochs = self.budget.epochs_of(row.method, at, share)
        filled = at(epochs)
        total = num_epochs(filled, per_epoch, S)
        if round(total) != epochs and "epochs" not in self.allow:  # branches in iterations may leave a few over
            options = ", ".join(f"{name}={value}" for name, value in filled.options.items())
            raise GrowpruneError(
                f"{row.method.__name__} trains for {total:g} epochs with {options}, but the budget is {epochs}. Change "
                f"its options, or add --allow epochs"
            )
        settings = {**self.settings, **{key: value for key, value in own.items() if not key.startswith("options.")}}
        settings["options"] = json.dumps(describe(filled.options), separators=(",", ":"))
        if filled.parts != chosen.parts:
            settings["parts"] = str(filled.parts)
        return filled, settings, round(total)

    @functools.cached_property
    def _model(self) -> nn.Module:
        """The model of the task, without values."""
        return self.base.shapes()

    def _per_epoch(self, recipe: Recipe) -> int:
        """Iterations per epoch of a row. Data is read again only if the row has a task of its own."""
        is_same = (recipe.task, recipe.accumulate) == (self.base.task, self.base.accumulate)
        return self.iterations_per_epoch if is_same else recipe.num_iterations_per_epoch()

    # Tuning

    def is_tuned(self) -> bool:
        """True if every row is tuned, so that no more jobs will follow."""
        return all(_is_over(self._try(trials)["points"]) for trials in self._trials().values())

    def write_choices(self) -> None:
        """Write tuning.json beside the runs of each row, with the choice so far, for later tables and pages."""
        for trials in self._trials().values():
            folder = trials[0].folder.parent.parent
            with writing_to(folder):
                folder.mkdir(parents=True, exist_ok=True)
                disk.write_json(folder / TUNING, self._try(trials))

    def _trials(self) -> dict[Cell, list[Job]]:
        """For each line of the table, the tuning runs: those with the first seed. Empty without a grid."""
        trials: dict[Cell, list[Job]] = {}
        for job in self.every_job if self.grid else ():
            if job.seed == self.seeds[0]:
                trials.setdefault(job.cell, []).append(job)
        return trials

    def _try(self, trials: Sequence[Job]) -> Json:
        """Results of all points of a row, and the chosen one, as `tuning.json` stores them.

        A point is chosen by validation data when all are finished or failed; among equals, the first.
        """
        task, first = self.base.task, trials[0]
        points: list[Json] = []
        for job in trials:
            run = job.read()
            status, error, score = run.status, job.error, run.validation
            if error or status == FAILED:  # a run that was not started here has said so in its log alone
                status, error = FAILED, error or run.why
            elif status == "finished" and (score is None or not math.isfinite(score)):
                status, error = FAILED, f"its validation {task.metric} is {score}"
            point = {"name": job.point.name, "folder": job.point.folder, "settings": dict(job.point.settings)}
            points.append({**point, "status": status, "error": error, "validation": score})
        scores = {n: point["validation"] for n, point in enumerate(points) if point["status"] == "finished"}
        best = Metric(task.metric, task.lower_is_better).best(scores) if _is_over(points) else None
        chosen: Json = {} if best is None else points[best]
        return {
            **{"row": first.row.name, "sparsity": first.sparsity, "grid": {key: [*v] for key, v in self.grid.items()}},
            **{"size": math.prod(map(len, self.grid.values())), "seed": first.seed, "metric": task.metric},
            **{"chosen": chosen.get("name"), "folder": chosen.get("folder"), "points": points},
        }

    # The table

    def table(self, jobs: Sequence[Job]) -> Comparison:
        """The table of the runs so far, with the rows that earlier calls left in the same folder."""
        planned = []
        for job in jobs:
            run = job.read()
            planned.append(replace(run, recipe=describe(job.recipe), origin={"row": job.row.name, **run.origin}))
        found = without_tried([*planned, *self._earlier()])
        rows = rows_of(found, self.allow)
        check_rows(rows, self.allow, with_epochs=self.budget.kind == "epochs")
        most = self.budget.max_epochs
        capped = [job.cell for job in jobs if job.epochs >= most and self.budget.kind == "flops"]
        return Comparison(
            rows,
            base=self.source,
            budget=asdict(self.budget),
            planned={job.folder: job.epochs for job in jobs},
            remarks=[
                f"budget: {self.budget}",
                *self._check_terms(),
                *(f"{row} {in_full(sparsity)} is capped at {most} epochs" for row, sparsity in dict.fromkeys(capped)),
            ],
        )

    def _earlier(self) -> list[Record]:
        """The runs of earlier calls in the same folder that are not among those of this call."""
        own = {job.folder for job in self.every_job}
        found = find_runs([self.out]) if self.out.is_dir() else []
        return [run for run in found if (run.recipe or run.damage) and run.folder not in own]

    def _check_terms(self) -> list[str]:
        """Raise if rows, with those of earlier calls, are not comparable. Return the allowed differences."""
        terms, is_equal = {}, self.budget.kind == "epochs"
        for job in self.every_job:
            name = f"{job.row.name} {in_full(job.sparsity)}"
            if name not in terms:
                tuning: Json = {"grid": self.grid} if self.grid else {}
                planned = Record(job.folder, recipe=describe(job.recipe), tuning=tuning)
                terms[name] = terms_of(planned, name, epochs=job.epochs if is_equal else None)
        for run in self._earlier():
            if run.damage:
                raise GrowpruneError(run.damage)
            name = str(run.folder.relative_to(self.out))
            terms[name] = terms_of(run, name, epochs=run.final_epochs if is_equal else None)
            if run.folder.parent.parent in {job.folder.parent.parent for job in self.every_job}:
                terms[name].fields.pop("tuning")  # a larger grid reuses the points of a smaller one
        return check([*terms.values()], self.allow)


def _is_over(points: Sequence[Json]) -> bool:
    return all(point["status"] in ("finished", FAILED) for point in points)


def _numbers(what: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    """Parse different numbers: "0,1,2" -> [0, 1, 2]"""
    try:
        values = [kind(item) for item in text.split(",") if item.strip()]
    except ValueError as error:
        wanted = "integers" if kind is int else "numbers"
        raise GrowpruneError(f"{what} must be comma-separated {wanted}, got {text!r}") from error
    if not values or len(set(values)) < len(values):
        raise GrowpruneError(f"{what} must be one or more different values, got {values}")
    return values
