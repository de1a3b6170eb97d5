"""The runs of a comparison: which there are, the command that makes each, and how far it is."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from growprune.compare.budget import Budget, check_length, cut_as_usual, num_epochs, num_iterations_per_epoch, spend
from growprune.compare.parsing import Row
from growprune.engine.compatibility import MAY_CHANGE, check_same_recipe, check_same_work, fields_of, flat
from growprune.engine.folder import RunFolder
from growprune.engine.metric import in_full
from growprune.engine.override import override
from growprune.engine.recipe import Recipe, describe, own_options
from growprune.engine.source import absolute
from growprune.errors import GrowpruneError
from growprune.plan.settings import check_counts, check_sparsity
from growprune.recipes import find
from growprune.runs import Record, read_run
from growprune.runs.record import failure_file

OWN = ("method", "options", "sparsity", "allocation", "seed")
"""Fields of the recipe that are the rows' and runs', and not for `--set`."""


@dataclass(frozen=True, eq=False)
class Job:
    """One run: a row at a sparsity with a seed."""

    row: Row
    sparsity: float
    seed: int
    epochs: float
    source: str
    """Of the recipe that all jobs are made from."""
    settings: dict[str, str]
    """What is set in it."""
    recipe: Recipe
    folder: Path

    @property
    def name(self) -> str:
        sparsity = f" {in_full(self.sparsity)}" if self.row.takes_sparsity else ""
        return f"{self.row.name}{sparsity} seed {self.seed}"

    @property
    def arguments(self) -> list[str]:
        """Of `growprune`: begins the run, goes on with it, or finds it done."""
        settings = [word for key, value in self.settings.items() for word in ("--set", f"{key}={value}")]
        return ["train", self.source, "--resume", "--out", str(self.folder), *settings]

    @property
    def command(self) -> str:
        """For a shell."""
        return shlex.join(["growprune", *self.arguments])

    @property
    def log(self) -> Path:
        """What the run said, if it was started here."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def failure(self) -> Path:
        """Holds the error of a run that failed."""
        return failure_file(self.folder)

    @property
    def is_finished(self) -> bool:
        return (self.folder / "result.json").exists()

    @property
    def error(self) -> str:
        """Why it failed, if it did."""
        return self.failure.read_text() if self.failure.exists() and not self.is_finished else ""

    def read(self) -> Record:
        """What its folder holds so far; raises if that is damaged."""
        run = read_run(self.folder)
        if run.damage:
            raise GrowpruneError(run.damage)
        return replace(run, row=self.row.name)

    def check_folder(self, iterations_per_epoch: int) -> None:
        """Raise if the folder holds another run: of another recipe, plan or model."""
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
                        f"{folder.result} is of a run with {name}={stored[name]!r}, but the comparison now says "
                        f"{wanted[name]!r}: put it back, or give another --out"
                    )


@contextlib.contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Say of what cannot be written where it was to go, and what to do."""
    try:
        yield
    except OSError as error:
        raise GrowpruneError(
            f"cannot write to {folder} ({error.strerror or error}): see that there is room and that you may write "
            f"there, or give another --out"
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
) -> list[Job]:
    """Every run, seed by seed, so that a comparison that is broken off has all rows with its first seeds."""
    _check(sparsities, seeds, settings)
    found = find(source)
    base = override(found, settings)
    per_epoch = num_iterations_per_epoch(base)
    cells = [(row, s) for row in rows for s in (sparsities if row.takes_sparsity else [0.0])]
    made = [_settle(base, row, sparsity, budget, per_epoch, "epochs" in allowed) for row, sparsity in cells]
    jobs = []
    for seed in seeds:
        for (row, sparsity), (own, epochs) in zip(cells, made, strict=True):
            whole = {**settings, **own, "seed": str(seed)}
            folder = out.resolve() / row.folder / in_full(sparsity) / f"seed{seed}"
            recipe = override(found, whole)
            jobs.append(Job(row, sparsity, seed, epochs, absolute(source), whole, recipe, folder))
    return jobs


def _check(sparsities: Sequence[float], seeds: Sequence[int], settings: Mapping[str, str]) -> None:
    for sparsity in sparsities:
        check_sparsity(sparsity)
    for seed in seeds:
        check_counts(0, seed=seed)
    for what, values in (("--sparsities", sparsities), ("--seeds", seeds)):
        if not values or len(set(values)) < len(values):
            raise GrowpruneError(f"{what} is {list(values)}, but wants one or more values, each once")
    for key in settings:
        if key.partition(".")[0] in OWN:
            raise GrowpruneError(f"--set {key}: a comparison decides it row by row; say it with --methods or --seeds")


def _place(row: Row, key: str, options: Sequence[str]) -> str:
    """What a key of a row sets: an option of its method, or a field of the recipe."""
    if key in options:
        return f"options.{key}"
    if key.partition(".")[0] not in {field.name for field in fields(Recipe)}:
        method, known = row.method.rpartition(":")[2], ", ".join(options) or "no options"
        raise GrowpruneError(
            f"the row {row.name!r} has {key!r}, but {method} takes {known}; what has a dot is a field of the recipe, "
            f"such as optimizer.lr"
        )
    return key


def _settle(
    base: Recipe, row: Row, sparsity: float, budget: Budget, per_epoch: int, is_free: bool
) -> tuple[dict[str, str], float]:
    """What is set in the recipe for a row, and how many epochs it trains for; its own options may say, if free."""
    own = {"method": row.method, "options": "{}", "sparsity": repr(sparsity)}
    own |= {"allocation": row.allocation} if row.takes_sparsity else {}
    options = own_options(override(base, own).method)
    own |= {_place(row, key, options): value for key, value in row.settings}
    begun = chosen = override(base, own)
    if "partition" not in own:
        begun = cut_as_usual(chosen)

    def at(epochs: int) -> Recipe:
        return spend(begun, epochs, per_epoch)

    epochs = budget.epochs_of(begun.method, at)
    filled = at(epochs)
    if not is_free:
        check_length(filled, epochs, per_epoch)
    own = {key: value for key, value in own.items() if not key.startswith("options.")}
    own["options"] = json.dumps(describe(filled.options), separators=(",", ":"))
    if filled.partition != chosen.partition:
        own["partition"] = str(filled.partition)
    return own, round(num_epochs(filled, per_epoch))
