"""The runs of a comparison, and training them, several processes at a time.

A worker needs nothing but the folder of its run: it runs the command that `--print-jobs` prints.
"""

from __future__ import annotations

import functools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from growprune.compare.rows import Point, Row
from growprune.engine.folder import RunFolder, check_same_recipe, check_same_work, fields_of, is_in_use
from growprune.engine.recipe import Recipe
from growprune.errors import GrowpruneError
from growprune.files.disk import writing_to
from growprune.files.weights_file import digest_of, weights_file
from growprune.runs import Record, read_run
from growprune.runs.record import failure_file, in_full
from growprune.runs.result import Json
from growprune.runs.table import MAY_CHANGE, flat
from growprune.tasks.task import num_cores

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
    def command(self) -> str:
        """The shell command that starts the run, or resumes it."""
        return shlex.join(["growprune", "resume", str(self.folder)])

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
        """Raise if the folder has a run of another recipe, plan or model, or one that began with other weights."""
        folder = RunFolder(self.folder)
        if folder.recipe.exists() or self.is_finished:
            run = self.read()
            began = digest_of_weights(run.recipe["weights"]) if run.result is None else run.result.weights
            now = digest_of_weights(self.recipe.weights)
            is_gone = now is None and self.recipe.weights == run.recipe["weights"]
            if not is_gone and (began or {}).get("sha256") != (now or {}).get("sha256"):
                file = (began or {}).get("file", "no file")
                raise GrowpruneError(
                    f"{self.folder} began with the weights of {file}, but the comparison has "
                    f"weights={self.recipe.weights!r} now, with other contents. Restore them, or choose another --out"
                )
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


@functools.cache
def digest_of_weights(path: str) -> dict[str, str] | None:
    """What a run records of the file with its first weights. None without such a file."""
    if not path or not Path(path).exists():
        return None
    file = weights_file(path)
    return {"file": file.name, "sha256": digest_of(file)}


STOPPED = {code for number in (signal.SIGINT, signal.SIGTERM) for code in (128 + number, -number)}
"""Exit codes of an interrupted run, with or without a checkpoint."""
REFUSED = 2
"""Exit code of a run with invalid input or folder."""
PATIENCE = 5.0
"""How long runs that are in use are tried again, in seconds: workers of a killed comparison may still be saving."""
EVERY_SECONDS = 30.0
"""How often the progress of a run is told."""


@dataclass
class Working:
    """Runs that are trained now, and how far all are.

    Args:
        jobs: all runs.
        tell: called with a job and what became of it: started, finished, failed, stopped, in use (by another process),
            or, now and then, progress.
    """

    jobs: Sequence[Job]
    workers: int
    tell: Callable[[Job, str], None]
    clock: Callable[[], float] = time.monotonic
    running: dict[Job, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began, self._done_before = self.clock(), self.epochs_done
        self._told: dict[Job, float] = {}

    @property
    def epochs_done(self) -> float:
        """Epochs of all runs so far. Runs that failed count as done, because nothing is left of them."""
        running = [job for job in self.jobs if not job.is_finished and not job.error]
        done = sum(job.epochs for job in self.jobs if job not in running)
        return done + sum(min(job.epochs, int(last_epoch(job).get("epoch", 0))) for job in running)

    @property
    def seconds(self) -> float:
        return self.clock() - self._began

    @property
    def seconds_left(self) -> float | None:
        """At the mean pace so far. None before anything was trained."""
        done = self.epochs_done
        if done <= self._done_before:
            return None
        return self.seconds * (sum(job.epochs for job in self.jobs) - done) / (done - self._done_before)

    def carry_out(self, should_stop: Callable[[], bool]) -> bool:
        """Train all runs that are not finished or failed. Return False if interrupted; running ones then save."""
        waiting = deque(job for job in self.jobs if not job.is_finished and not job.error)
        is_stopping = False
        try:
            while self.running or (waiting and not is_stopping):
                if not is_stopping and should_stop():
                    is_stopping = True
                    self._stop()
                while waiting and len(self.running) < self.workers and not is_stopping:
                    job = waiting.popleft()
                    if self.seconds < PATIENCE and is_in_use(job.folder):
                        waiting.append(job)
                        break
                    self._begin(job)
                for job in [job for job, process in self.running.items() if process.poll() is not None]:
                    self.tell(job, _end(job, self.running.pop(job).returncode))
                for job in [job for job in self.running if self.clock() - self._told[job] > EVERY_SECONDS]:
                    self._told[job] = self.clock()
                    self.tell(job, "progress")
                time.sleep(0.02)
        finally:
            self._stop()  # nothing runs on without us
        return not is_stopping

    def _begin(self, job: Job) -> None:
        if is_in_use(job.folder):
            self.tell(job, "in use")
            return
        with writing_to(job.log.parent):
            job.log.parent.mkdir(parents=True, exist_ok=True)
            log_file = job.log.open("ab")
        command = [sys.executable, "-m", "growprune", "resume", str(job.folder)]
        # parallel runs share the cores, unless OMP_NUM_THREADS is set
        threads = {} if self.workers == 1 else {"OMP_NUM_THREADS": str(max(1, num_cores() // self.workers))}
        with log_file as log:
            # a session of its own, so that Ctrl-C reaches it once, from us: a second signal would end it unsaved
            self.running[job] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=threads | dict(os.environ),
                start_new_session=True,
            )
        self._told[job] = self.clock()
        self.tell(job, "started")

    def _stop(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)


def last_epoch(job: Job) -> Json:
    """The last epoch in the log of a run. Empty before the first."""
    return next((event for event in reversed(Record(job.folder).events) if event["event"] == "epoch"), {})


def _end(job: Job, status: int) -> str:
    if job.is_finished:
        return "finished"
    if status in STOPPED:
        return "stopped"
    if status == REFUSED and is_in_use(job.folder):  # somebody else began it in the same moment
        return "in use"
    job.failure.write_text(last_words(job.log, status))
    return "failed"


def last_words(log: Path, status: int) -> str:
    """The error of a run in one line: the last message of growprune that is no warning, else its last output."""
    if status < 0:
        return f"killed by signal {-status}" + (" (out of memory?)" if status == -signal.SIGKILL else "")
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("growprune: warning:")]
    own = [line.removeprefix("growprune: ") for line in lines if line.startswith("growprune: ")]
    return (own or lines or [f"ended with exit code {status}"])[-1]
