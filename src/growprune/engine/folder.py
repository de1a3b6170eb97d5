"""The folder of a run: its files, and the rules for entering one."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from growprune.engine import json_file
from growprune.engine.events import Event
from growprune.engine.mesh import job
from growprune.engine.recipe import Recipe, describe
from growprune.errors import GrowpruneError
from growprune.files import atomic
from growprune.plan import Plan, walk
from growprune.plan.folding import Row, fold

FORMAT = 3
"""Of run folders. A run of another format is refused."""

PATIENCE = 15.0
"""Seconds to wait for the lock of a folder."""

_RECIPE: json_file.Names = {
    "recipe.task.name": str,
    "recipe.method": str,
    "recipe.sparsity": json_file.NUMBER,
    "recipe.options?": dict,
    "recipe.seed?": int,
    "recipe.accumulate?": int,
    "format?": int,
    "job?": str,
    "source?": str,
    "settings?": dict,
    "settings?.*": str,
    "extended?": int,
}
_ROW: json_file.Names = {
    "stage": int,
    "branch": (int, type(None)),
    "edits": str,
    "epoch": int,
    "alive": int,
    "explored?": json_file.NUMBER,
    "churn?": json_file.NUMBER,
    "validation?.*": json_file.NUMBER,
    "candidate?.*": json_file.NUMBER,
}
RESULT: json_file.Names = {
    "history": list,
    **{f"history.*.{name}": kind for name, kind in _ROW.items()},
    "test": dict,
    "test.*": json_file.NUMBER,
    "best": (dict, type(None)),
    "best?.stage": int,
    "best?.test.*": json_file.NUMBER,
    "sparsity.totals.alive": int,
    "sparsity.totals.prunable": int,
    "file_bytes": int,
    "data?": dict,
    "data?.num_batches?": int,
}


class HoldsRun(GrowpruneError):
    """A folder in which a run was to begin has one already, perhaps of a process that came first."""


class RunFolder:
    """The files of a run.

    Args:
        rank: which of the processes of the run this is; the first keeps the log of the run.
    """

    def __init__(self, path: Path, rank: int = 0) -> None:
        self.path, self.rank = path, rank
        self.recipe = path / "recipe.json"
        self.plan = path / "plan.json"
        self.log = path / (f"log-{rank}.jsonl" if rank else "log.jsonl")
        self.checkpoints = path / "checkpoints"
        self.search_end = self.checkpoints / "search_end"
        """Holds the number of the checkpoint at the end of the search, from which the search can be extended."""
        self.best = path / "best.safetensors"
        self.model = path / "model.safetensors"
        self.result = path / "result.json"

    def branch(self, stage: int, branch: int) -> Path:
        """Checkpoints of one branch of a fork, by the processes that train it."""
        return self.checkpoints / "branches" / f"{stage}-{branch}"

    def explored(self, stage: int, branch: int) -> Path:
        """Which weights a branch of a fork has explored."""
        return self.branch(stage, branch) / "explored.safetensors"

    def remove_branches(self, before: int) -> None:
        """Remove the checkpoints of forks before a stage of the plan."""
        for path in (self.checkpoints / "branches").glob("[0-9]*-[0-9]*"):
            if int(path.name.partition("-")[0]) < before:
                shutil.rmtree(path, ignore_errors=True)

    def check_free(self, recipe: Recipe) -> None:
        """Raise unless the folder is new or empty."""
        if self.recipe.exists():
            same = self.read_recipe()["recipe"] == describe(recipe)
            whose = "this recipe's" if same else "another recipe's"
            go_on = f"go on with {self.how_to_resume()}, or " if same else ""
            raise HoldsRun(f"{self.path} holds {whose} run: {go_on}give another --out")
        if self.path.exists() and (not self.path.is_dir() or any(map(_is_of_others, self.path.iterdir()))):
            raise GrowpruneError(f"{self.path} exists and is not an empty folder, nor a run: give another --out")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """While it lasts, no other run can write here; only the first process of a run asks."""
        if self.rank:
            yield
            return
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            if not _lock(descriptor, PATIENCE):
                raise GrowpruneError(f"{self.path} is in use by another process: wait for it, or stop it first")
            for folder in (self.path, self.checkpoints, *self.checkpoints.glob("branches/*")):
                atomic.remove_leftovers(folder)
            yield
        finally:
            os.close(descriptor)

    def make(self) -> None:
        """Make the folder itself, so that it can be locked; one that is there stays as it is."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"cannot write to {self.path}: {error}") from error

    def write_recipe(self, recipe: Recipe, origin: dict[str, Any]) -> None:
        """Say what runs here; `origin` says how to find the recipe again."""
        started_by = {"job": job()} if job() else {}
        json_file.write(self.recipe, {"format": FORMAT, **started_by, **origin, "recipe": describe(recipe)})

    def read_recipe(self) -> dict[str, Any]:
        """What `write_recipe` wrote; raises GrowpruneError if the folder holds no run, or one of another format."""
        try:
            content = json_file.read(self.recipe, _RECIPE, "put a copy of it back, or start a new run elsewhere")
        except OSError as error:
            raise GrowpruneError(f"{self.path} holds no run: {self.recipe.name} cannot be read ({error})") from error
        if (found := content.get("format") or 1) != FORMAT:
            age, remedy = ("a newer", "upgrade growprune") if found > FORMAT else ("an older", "start a new run")
            raise GrowpruneError(
                f"{self.path} was started by {age} growprune (format {found}, and this one reads {FORMAT}): use that "
                f"version, or {remedy}"
            )
        return content

    def store_files(self, files: Mapping[str, bytes]) -> None:
        """Keep what a task made of its data, by file name; what is there already must be the same."""
        for name, content in files.items():
            path = self.path / name
            if path.exists() and path.read_bytes() != content:
                raise GrowpruneError(
                    f"{path} is not what the data gives now: the data, or the weights it begins with, changed since "
                    f"the run began; put it back, or start a new run"
                )
            if not path.exists() and self.rank == 0:
                with atomic.replacing(path) as file:
                    file.write(content)

    def read_origin(self) -> dict[str, Any]:
        """How to find the recipe again."""
        return {name: value for name, value in self.read_recipe().items() if name not in ("recipe", "format", "job")}

    def portable_origin(self) -> dict[str, Any]:
        """How to find the recipe again on any machine: without where files lie on this one."""
        try:
            origin = self.read_origin()
        except GrowpruneError:  # the outcome of a run is worth more than what is known of its beginning
            return {}
        path, colon, function = str(origin.get("source") or "").rpartition(":")
        named = {"source": f"{Path(path).name}:{function}"} if colon else {}
        settings = {name: value for name, value in (origin.get("settings") or {}).items() if name != "task.data"}
        settings |= {"weights": Path(settings["weights"]).name} if "weights" in settings else {}
        return origin | named | ({"settings": settings} if "settings" in origin else {})

    def how_to_resume(self) -> str:
        """The command line finds the recipe again if it started the run; one from Python only Python has."""
        if self.read_origin().get("source"):
            return f"`growprune resume {shlex.quote(str(self.path))}`"
        return f"growprune.resume(recipe, {str(self.path)!r})"

    def read_result(self) -> dict[str, Any]:
        remedy = "remove it and resume the run, which makes it again"
        return json_file.read(self.result, RESULT, remedy)

    def read_rows(self, stage: int, branch: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """What came of a branch of a fork, epoch by epoch, and what it cost."""
        folder = self.branch(stage, branch)
        names = {"rows": list, "cost": dict, **{f"rows.*.{name}": kind for name, kind in _ROW.items()}}
        remedy = f"remove {folder} and resume, which trains that branch again"
        content = json_file.read(folder / "rows.json", names, remedy)
        return content["rows"], content["cost"]

    def write_rows(self, stage: int, branch: int, rows: Sequence[dict[str, Any]], cost: Mapping[str, Any]) -> None:
        folder = self.branch(stage, branch)
        folder.mkdir(parents=True, exist_ok=True)
        json_file.write(folder / "rows.json", {"rows": list(rows), "cost": dict(cost)})

    def write_plan(self, plan: Plan) -> None:
        """The parts, and the phases with those that are alike folded into one row; a long plan has thousands."""
        content = {"parts": parts_of(plan), "phases": phases_of(plan), "sha256": digest_of(plan)}
        json_file.write(self.plan, content)

    def read_plan(self) -> dict[str, Any]:
        """What `write_plan` wrote; nothing if the file is lost or damaged, since no training depends on it."""
        try:
            return json_file.read(self.plan, {"parts": dict, "phases": list, "sha256": str}, "")
        except (OSError, GrowpruneError):
            return {}

    def append(self, event: Event) -> None:
        """Add a line to the log. A line cut short by a kill is ended first, so that it spoils no other."""
        line = json.dumps({"time": round(time.time(), 3), **event}) + "\n"
        try:
            with self.log.open("a+b") as log:
                if log.tell() and log.seek(-1, 2) >= 0 and log.read(1) != b"\n":
                    line = "\n" + line
                log.write(line.encode())
        except OSError as error:
            raise OSError(f"cannot write to {self.log}: {error}") from error

    def kept(self) -> list[int]:
        """Checkpoints that stay whatever comes."""
        with contextlib.suppress(FileNotFoundError, ValueError):  # damaged, it keeps the run only from being extended
            return [int(self.search_end.read_text())]
        return []

    def set_aside(self) -> None:
        """Move the outcome of a finished run out of the way of one that goes on."""
        earlier = self.path / "earlier"
        target = earlier / str(1 + sum(1 for _ in earlier.glob("*")))
        target.mkdir(parents=True)
        for path in (self.result, self.model, self.best):
            if path.exists():
                path.rename(target / path.name)


def phases_of(plan: Plan) -> list[dict[str, Any]]:
    """The phases of a plan as plan.json has them."""
    return [row.to_dict() for row in fold(walk(plan))]


def digest_of(plan: Plan) -> str:
    """Tells plans apart that look alike when folded, as two ways from one sparsity to another do."""
    phases = [Row((scheduled,)).to_dict() for scheduled in walk(plan)]
    return hashlib.sha256(json.dumps(phases).encode()).hexdigest()


def parts_of(plan: Plan) -> dict[str, list[str]]:
    """The tensors of each part of the model."""
    return {part.name: list(part.tensors) for part in plan.partition}


def _is_of_others(path: Path) -> bool:
    """Whether a file is more than what a kill leaves of a run that was just about to start."""
    return not path.name.startswith(".recipe.json.")


def _lock(descriptor: int, patience: float) -> bool:
    """Whether nobody else has the lock; tries for some seconds, since workers of a killed process hold it too."""
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)
        except OSError:  # a file system that knows no locks
            return True
        else:
            return True


def is_in_use(path: Path) -> bool:
    """Whether another process has the lock of a folder."""
    if not path.is_dir():
        return False
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return not _lock(descriptor, patience=0)
    finally:
        os.close(descriptor)
