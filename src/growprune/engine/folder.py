"""The folder of a run: its files, the rules for entering one, and checks that a resumed run is the same."""

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
from itertools import zip_longest
from pathlib import Path
from typing import Any

from growprune.engine.recipe import Recipe, describe
from growprune.errors import GrowpruneError, shorten
from growprune.files import checkpoint, disk
from growprune.files.disk import finite
from growprune.files.reader import open_sparse
from growprune.plan import Plan, Row, ScheduledPhase, fold, walk
from growprune.runs.record import FORMAT, origin_of, read_recipe
from growprune.runs.result import Result
from growprune.runs.table import MAY_CHANGE, flat

PATIENCE = 15.0
"""Seconds to wait for the lock of a folder."""


class HoldsRun(GrowpruneError):
    """The folder for a new run already has a run, perhaps of a process that came first."""


class RunFolder:
    """The files of a run.

    Args:
        rank: rank of this process. Rank 0 writes the log of the run.
    """

    def __init__(self, path: Path, rank: int = 0) -> None:
        self.path, self.rank = path, rank
        self.recipe = path / "recipe.json"
        self.plan = path / "plan.json"
        self.log = path / (f"log-{rank}.jsonl" if rank else "log.jsonl")
        self.checkpoints = path / "checkpoints"
        self.best = path / "best.safetensors"
        self.model = path / "model.safetensors"
        self.result = path / "result.json"

    def branch(self, stage: int, branch: int) -> Path:
        """Folder for the checkpoints of one branch of a fork."""
        return self.checkpoints / "branches" / f"{stage}-{branch}"

    def explored(self, stage: int, branch: int) -> Path:
        """File with the weights that a branch of a fork explored."""
        return self.branch(stage, branch) / "explored.safetensors"

    def save(self, state: dict[str, Any], scheduled: ScheduledPhase, previous: int) -> int:
        """Write a checkpoint of the run, or of a branch, and return its number. The two newest are kept.

        Args:
            previous: number of the run's checkpoint that was written or loaded last. Newer ones are damaged.
        """
        folder = self.checkpoints
        if scheduled.branch is not None:
            folder = self.branch(scheduled.stage, scheduled.branch)
            previous = max(checkpoint.numbers(folder), default=0)
        number = max(checkpoint.numbers(folder), default=0) + 1
        checkpoint.save(folder, number, state)
        checkpoint.remove_old(folder, [previous, number])
        if scheduled.branch is None:
            for path in (folder / "branches").glob("[0-9]*-[0-9]*"):  # those of forks that are over
                if int(path.name.partition("-")[0]) < scheduled.stage:
                    shutil.rmtree(path, ignore_errors=True)
        return number

    def check_free(self, recipe: Recipe) -> None:
        """Raise unless the folder is new or empty."""
        if self.recipe.exists():
            same = self.read_recipe()["recipe"] == describe(recipe)
            whose = "this" if same else "another"
            remedy = f"Resume it with {self.how_to_resume()}, or choose" if same else "Choose"
            raise HoldsRun(f"{self.path} already has a run of {whose} recipe. {remedy} another --out")
        # a run killed at its start may have left a temporary file
        if self.path.exists() and (
            not self.path.is_dir() or any(not path.name.startswith(".recipe.json.") for path in self.path.iterdir())
        ):
            raise GrowpruneError(f"--out must be a new or empty folder, but {self.path} exists. Choose another --out")

    def is_ours(self) -> bool:
        """True if the folder has the run of this job, because torchrun restarted the processes after a failure.

        An unfinished run is resumed, whoever started it. The result of an earlier job is not taken for ours.
        """
        if "TORCHELASTIC_RUN_ID" not in os.environ or not self.recipe.exists():
            return False
        is_restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        return not self.result.exists() or (is_restarted and (self.read_recipe().get("job") or "") == job())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the folder, so that no other run can write here. Only rank 0 takes it."""
        if self.rank:
            yield
            return
        with holding(self.path, PATIENCE, "by another process. Wait for it, or stop it first"):
            for folder in (self.path, self.checkpoints, *self.checkpoints.glob("branches/*")):
                disk.remove_leftovers(folder)
            yield

    def make(self) -> None:
        """Make the folder if it does not exist, so that it can be locked."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"cannot write to {self.path} ({error.strerror or error}). Choose another --out") from error

    def write_recipe(self, recipe: Recipe, origin: dict[str, Any]) -> None:
        """Write recipe.json. `origin` says how to find the recipe again."""
        here = {"inode": self.path.stat().st_ino} | ({"job": job()} if job() else {})
        disk.write_json(self.recipe, {"format": FORMAT, **here, **origin, "recipe": describe(recipe)})

    def is_made_here(self) -> bool:
        """True if this user started the run in this folder. A copied or unpacked folder has another inode."""
        found = self.path.stat()
        return found.st_uid == os.geteuid() and self.read_recipe().get("inode") == found.st_ino

    def read_recipe(self) -> dict[str, Any]:
        """Read recipe.json. Raise GrowpruneError if the folder has no run, or one of another format."""
        return read_recipe(self.path)

    def store_files(self, files: Mapping[str, bytes]) -> None:
        """Store files that a task made from its data. Raise if a stored file differs."""
        for name, content in files.items():
            path = self.path / name
            if path.exists() and disk.plain_file(path).read_bytes() != content:
                raise GrowpruneError(
                    f"{path} differs from what the data gives now: the data, or the file of initial weights, changed "
                    f"since the run started. Restore it, or start a new run"
                )
            if not path.exists() and self.rank == 0:
                with disk.replacing(path) as file:
                    file.write(content)

    def read_origin(self) -> dict[str, Any]:
        """How to find the recipe again."""
        return origin_of(self.read_recipe())

    def how_to_resume(self) -> str:
        """The command that resumes the run, or the Python call for a run that was started from Python."""
        if self.read_origin().get("source"):
            return f"`growprune resume {shlex.quote(str(self.path))}`"
        return f"growprune.resume(recipe, {str(self.path)!r})"

    def read_result(self) -> dict[str, Any]:
        return Result.read(self.result).to_dict()

    def check_model(self, result: Mapping[str, Any]) -> None:
        """Raise if the model file of a finished run is missing or has another length or a damaged header."""
        try:
            length = disk.plain_file(self.model).stat().st_size
            if length != result["file_bytes"]:
                raise GrowpruneError(f"it has {length} bytes instead of {result['file_bytes']}")
            with open_sparse(self.model):
                pass
        except (GrowpruneError, OSError) as error:
            remedy = f"remove {self.result} and resume the run to write both again"
            raise GrowpruneError(f"{self.model} is missing or damaged ({error}): {remedy}") from error

    def read_rows(self, stage: int, branch: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Read the history and the cost of a branch of a fork."""
        folder = self.branch(stage, branch)
        names: disk.Names = {"rows": list, "rows.*": dict, "cost": dict}
        remedy = f"remove {folder} and resume the run to train that branch again"
        content = disk.read_json(folder / "rows.json", names, remedy)
        return content["rows"], content["cost"]

    def write_rows(self, stage: int, branch: int, rows: Sequence[dict[str, Any]], cost: Mapping[str, Any]) -> None:
        folder = self.branch(stage, branch)
        folder.mkdir(parents=True, exist_ok=True)
        disk.write_json(folder / "rows.json", {"rows": list(rows), "cost": dict(cost)})

    def write_plan(self, plan: Plan) -> None:
        """Write the parts and the phases. Similar phases share a row, because a long plan has thousands."""
        content = {"parts": parts_of(plan), "phases": phases_of(plan), "sha256": digest_of(plan)}
        disk.write_json(self.plan, content)

    def read_plan(self) -> dict[str, Any]:
        """Read plan.json. Empty if the file is missing or damaged, because training does not depend on it."""
        try:
            return disk.read_json(self.plan, {"parts": dict, "phases": list, "phases.*.edits": str, "sha256": str}, "")
        except (OSError, GrowpruneError):
            return {}

    def append(self, event: Mapping[str, Any]) -> None:
        """Append a line to the log. If a kill cut the last line short, end it first."""
        line = json.dumps(disk.finite({"time": round(time.time(), 3), **event})) + "\n"
        try:
            with self.log.open("a+b") as log:
                if log.tell() and log.seek(-1, 2) >= 0 and log.read(1) != b"\n":
                    line = "\n" + line
                log.write(line.encode())
        except OSError as error:
            raise OSError(f"cannot write to {self.log}: {error}") from error


def job() -> str:
    """A name for the torchrun job, the same after each restart. Empty without torchrun.

    The run id alone is not enough: it is "none" unless the user gives one. The log folder is new for each job.
    """
    error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))  # <logs of the job>/attempt_0/<rank>/error.json
    return error_file.parent.parent.parent.name or os.environ.get("TORCHELASTIC_RUN_ID", "")


def portable(origin: Mapping[str, Any]) -> dict[str, Any]:
    """How to find a recipe again on any machine, without the paths of this one."""
    path, colon, function = str(origin.get("source") or "").rpartition(":")
    named = {"source": f"{Path(path).name}:{function}"} if colon else {}
    settings = {name: value for name, value in (origin.get("settings") or {}).items() if name != "task.data"}
    settings |= {"weights": Path(settings["weights"]).name} if "weights" in settings else {}
    return {**origin, **named} | ({"settings": settings} if "settings" in origin else {})


def phases_of(plan: Plan) -> list[dict[str, Any]]:
    """The phases of a plan as plan.json stores them."""
    return [row.to_dict() for row in fold(walk(plan))]


def digest_of(plan: Plan) -> str:
    """Digest of all phases of a plan. It differs for plans that look alike when folded."""
    phases = [Row((scheduled,)).to_dict() for scheduled in walk(plan)]
    return hashlib.sha256(json.dumps(phases).encode()).hexdigest()


def parts_of(plan: Plan) -> dict[str, list[str]]:
    """The tensors of each part of the model."""
    return {part.name: list(part.tensors) for part in plan.partition}


@contextlib.contextmanager
def holding(path: Path, patience: float, who: str) -> Iterator[None]:
    """Hold the lock of a folder. If it is not free after some seconds, the error says by whom it is in use."""
    descriptor = os.open(path, os.O_RDONLY)
    deadline = time.monotonic() + patience  # workers of a killed process may still hold the lock
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise GrowpruneError(f"{path} is in use {who}") from error
                time.sleep(0.1)
                continue
            except OSError:  # a file system that knows no locks
                pass
            break
        yield
    finally:
        os.close(descriptor)


def is_in_use(path: Path) -> bool:
    """True if another process holds the lock of a folder."""
    if path.is_dir():
        try:
            with holding(path, 0, ""):
                pass
        except GrowpruneError:
            return True
    return False


def check_same_recipe(folder: RunFolder, recipe: Recipe) -> None:
    """Raise if a run was started with another recipe. The error names the first field that differs."""
    given, stored = fields_of(recipe), flat(folder.read_recipe()["recipe"])
    for name in [name for name in {**given, **stored} if name not in MAY_CHANGE]:
        if name not in given or name not in stored or stored[name] != given[name]:
            began = f"with {name}={_short(stored[name])}" if name in stored else f"without {name}"
            now = _short(given[name]) if name in given else f"no {name}"
            raise GrowpruneError(
                f"{folder.path} was started {began}, but the recipe has {now} now. Restore it, or start a new run"
            )


def check_same_plan(folder: RunFolder, plan: Plan) -> None:
    """Raise if the same recipe now gives another plan. The error names the first phase that differs.

    This happens if a default or the code of a method has changed.
    """
    began, now = folder.read_plan(), json.loads(json.dumps(phases_of(plan)))
    if not began:
        return
    rows = zip_longest(began["phases"], now, fillvalue={"edits": "no phase"})
    differing = [(_short(old["edits"]), _short(new["edits"])) for old, new in rows if old != new]
    if differing:
        what = f"it has {differing[0][0]}, but the recipe gives {differing[0][1]} now"
    elif began["sha256"] != digest_of(plan):  # a way from one sparsity to another is one row of phases
        what = "its phases look the same in plan.json, but some numbers in them differ"
    else:
        return
    raise GrowpruneError(f"{folder.path} was started with another plan: {what}. {_SAME_CODE}")


_SAME_CODE = "Resume with the versions of growprune and of your code that started it, or start a new run"


def check_same_work(folder: RunFolder, recipe: Recipe, iterations_per_epoch: int) -> None:
    """Raise if the recipe of a run now gives another plan or other parts. The error names the first that differs.

    For an unfinished run, `check_same_tensors` checks every tensor of the checkpoint.
    """
    plan = recipe.plan(recipe.shapes(), iterations_per_epoch)
    check_same_plan(folder, plan)
    began, now = folder.read_plan().get("parts", {}), parts_of(plan)
    for name in {**began, **now} if began else ():
        if began.get(name) != now.get(name):
            raise GrowpruneError(
                f"{folder.path} was started with another model or other parts: part {name} was "
                f"{_short(began.get(name, 'missing'))}, and is {_short(now.get(name, 'missing'))} now. {_SAME_CODE}"
            )


def fields_of(recipe: Recipe) -> dict[str, Any]:
    """Every setting of a recipe as plain JSON values, by dotted names such as `task.width`."""
    return flat(json.loads(json.dumps(finite(describe(recipe)))))  # as it comes back from a file


def _short(value: Any) -> str:
    return shorten(repr(value), 200)
