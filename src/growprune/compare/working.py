"""Runs the jobs of a comparison, several processes at a time. Each runs the command that `--print-jobs` prints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from growprune.compare.jobs import Job, writing_to
from growprune.engine.folder import is_in_use
from growprune.tasks.cores import num_cores

STOPPED = {code for number in (signal.SIGINT, signal.SIGTERM) for code in (128 + number, -number)}
"""Exit codes of an interrupted run, with or without a checkpoint."""
REFUSED = 2
"""Exit code of a run with invalid input or folder."""

Tell = Callable[[Job, str], None]
"""Called with a job and its new state: started, finished, failed, stopped or in use by another process."""


def carry_out(jobs: Sequence[Job], *, workers: int, should_stop: Callable[[], bool], tell: Tell) -> bool:
    """Run all jobs that are not finished or failed. Return False if interrupted; running jobs then save checkpoints."""
    waiting = deque(job for job in jobs if not job.is_finished and not job.error)
    running: dict[Job, subprocess.Popen[bytes]] = {}
    is_stopping = False
    try:
        while running or (waiting and not is_stopping):
            if not is_stopping and should_stop():
                is_stopping = True
                _stop(running)
            while waiting and len(running) < workers and not is_stopping:
                _begin(waiting.popleft(), running, workers, tell)
            for job in [job for job, process in running.items() if process.poll() is not None]:
                tell(job, _end(job, running.pop(job).returncode))
            time.sleep(0.02)
    finally:
        _stop(running)  # nothing runs on without us
    return not is_stopping


def _begin(job: Job, running: dict[Job, subprocess.Popen[bytes]], workers: int, tell: Tell) -> None:
    if is_in_use(job.folder):
        tell(job, "in use")
        return
    with writing_to(job.log.parent):
        job.log.parent.mkdir(parents=True, exist_ok=True)
        log_file = job.log.open("ab")
    command = [sys.executable, "-m", "growprune", *job.arguments]
    with log_file as log:
        # a session of its own, so that Ctrl-C reaches it once, from us: a second signal would end it unsaved
        running[job] = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(workers), start_new_session=True
        )
    tell(job, "started")


def _environment(workers: int) -> Mapping[str, str]:
    """Environment of a run. Parallel runs share the cores, unless OMP_NUM_THREADS is set."""
    threads = {} if workers == 1 else {"OMP_NUM_THREADS": str(max(1, num_cores() // workers))}
    return threads | dict(os.environ)


def _stop(running: Mapping[Job, subprocess.Popen[bytes]]) -> None:
    for process in running.values():
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)


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
    """The error of a run in one line: the last line of its output that is not a warning."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    said = [line for line in lines if line and not line.startswith("growprune: warning:")]
    if status < 0:
        return f"killed by signal {-status}" + (" (out of memory?)" if status == -signal.SIGKILL else "")
    return said[-1].removeprefix("growprune: ") if said else f"ended with exit code {status}"
