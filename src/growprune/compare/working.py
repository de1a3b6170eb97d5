"""Trains the runs of a comparison, several processes at a time. Each runs the command that `--print-jobs` prints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from growprune.compare.jobs import Job, writing_to
from growprune.engine.folder import is_in_use
from growprune.logs.rows import read_events
from growprune.tasks.task import num_cores

STOPPED = {code for number in (signal.SIGINT, signal.SIGTERM) for code in (128 + number, -number)}
"""Exit codes of an interrupted run, with or without a checkpoint."""
REFUSED = 2
"""Exit code of a run with invalid input or folder."""
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
        return sum(job.epochs if job.is_finished or job.error else epoch_of(job) for job in self.jobs)

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
                    self._begin(waiting.popleft())
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
        command = [sys.executable, "-m", "growprune", *job.arguments]
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


def last_epoch(job: Job) -> Mapping[str, object]:
    """The last epoch in the log of a run. Empty before the first."""
    events = read_events(job.folder) if job.folder.is_dir() else []
    return next((event for event in reversed(events) if event["event"] == "epoch"), {})


def epoch_of(job: Job) -> float:
    """Epochs that an unfinished run has trained."""
    epoch = last_epoch(job).get("epoch", 0)
    return min(job.epochs, epoch) if isinstance(epoch, int) else 0


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
