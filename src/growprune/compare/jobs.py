"""The runs of a comparison: their folders and their state. A worker needs nothing but the folder of its run."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from growprune.compare.typed import Point, Row
from growprune.engine.folder import RunFolder, check_same_recipe, check_same_work, fields_of, is_in_use
from growprune.engine.recipe import Recipe
from growprune.errors import GrowpruneError
from growprune.runs import Record, read_run
from growprune.runs.comparable import MAY_CHANGE, flat
from growprune.runs.metric import in_full
from growprune.runs.record import failure_file

EARLIER = ".earlier"
"""Folder in --out for runs that were made again. Tables do not look into folders with a dot."""


@dataclass(frozen=True, eq=False)
class Job:
    """One run: a row at a sparsity, at a point of its grid, with a seed."""

    row: Row
    sparsity: float
    point: Point
    seed: int
    epochs: float
    recipe: Recipe
    source: str
    """The source of the recipe that all jobs are made from."""
    settings: Mapping[str, str]
    """What makes `recipe` of that source."""
    files: Mapping[str, str]
    """Digests of the user's own files that the run executes, by name."""
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
        return ["resume", str(self.folder)]

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
        return run

    def changed_files(self) -> list[str]:
        """The user's files that have changed since the run was begun. Unknown for results from before."""
        if not self.files or not self.folder.exists():
            return []
        then = self.read().origin.get("files") or self.files
        return [name for name in {**then, **self.files} if then.get(name) != self.files.get(name)]

    def put_aside(self, out: Path) -> None:
        """Move the run to a folder for earlier ones, to be made again."""
        if is_in_use(self.folder):
            raise GrowpruneError(f"{self.folder} is in use by another process. Wait for it, or stop it first")
        place = out / EARLIER / self.folder.relative_to(out)
        number = next(n for n in range(1, 10**6) if not place.with_name(f"{place.name}-{n}").exists())
        with writing_to(place.parent):
            place.parent.mkdir(parents=True, exist_ok=True)
            self.folder.rename(place.with_name(f"{place.name}-{number}"))
            self.failure.unlink(missing_ok=True)

    def write_recipe(self) -> None:
        """Write recipe.json, with all that a worker needs, unless the run has begun."""
        folder = RunFolder(self.folder)
        if not folder.recipe.exists() and not self.is_finished:
            origin = {"source": self.source, "settings": dict(self.settings)}
            with writing_to(self.folder):
                folder.make()
                folder.write_recipe(self.recipe, origin | {"row": self.row.name, "files": dict(self.files)})

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
