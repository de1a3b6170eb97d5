"""Processes that fork from one which has loaded torch: each starts seconds sooner than one of its own would."""

import contextlib
import multiprocessing
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

PRELOAD = [
    "growprune.engine",
    "growprune.cli",
    "growprune.recipes",
    "growprune.sharding",
    "torch._dynamo",  # what an optimizer's first step imports
    "torch.distributed.checkpoint",
    "sklearn.datasets",
    "pytest",  # which the modules of targets import
]
"""What a process has that others fork from. None of it is used."""

HANG_SECONDS = 600.0
"""When a test that waits for a process gives up. It only keeps tests from hanging: on no machine is it a deadline."""


def wait_until(condition: Callable[[], bool], is_alive: Callable[[], bool] = lambda: True) -> None:
    """Wait for what a process does; if `is_alive` says that it has ended before, or hangs, that is an error."""
    until = time.monotonic() + HANG_SECONDS
    while not condition():
        assert is_alive() or condition(), "it ended before"
        assert time.monotonic() < until, "it hangs"
        time.sleep(0.005)


def context() -> ForkServerContext:
    """One server for all tests of a worker: what it loads is decided before its first process."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOAD)
    return made


class Command:
    """A command that runs as if it had been started with `python` and some words; much like a Popen.

    The first words are the path of a script, or -m and a module. `most_bytes` is how large a file may become.
    """

    def __init__(
        self,
        words: Sequence[str],
        out: Path,
        err: Path,
        *,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        most_bytes: int | None = None,
    ) -> None:
        there = dict(os.environ if environment is None else environment)
        self.out, self.err = out, err
        self.process = context().Process(target=_become, args=(words, cwd, there, out, err, most_bytes))
        self.process.start()

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self) -> subprocess.CompletedProcess[str]:
        self.process.join(HANG_SECONDS)
        assert self.process.exitcode is not None, "it hangs"
        return subprocess.CompletedProcess((), self.process.exitcode, self.out.read_text(), self.err.read_text())


@contextlib.contextmanager
def started(*words: str, **settings: Any) -> Iterator[Command]:
    """A command; if it still runs in the end, it is killed."""
    with tempfile.TemporaryDirectory() as folder:
        command = Command(words, Path(folder, "out"), Path(folder, "err"), **settings)
        try:
            yield command
        finally:
            command.process.kill()
            command.process.join()


def python(*words: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """What `python` with these words says, if it ends well."""
    with started(*words, cwd=cwd, environment=environment) as command:
        done = command.wait()
    assert done.returncode == 0, done.stderr
    return done.stdout


def growprune(*arguments: str, cwd: Path | None, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    with started("-m", "growprune", *arguments, cwd=cwd, environment=environment) as command:
        return command.wait()


def _become(
    words: Sequence[str], cwd: Path | None, environment: dict[str, str], out: Path, err: Path, most_bytes: int | None
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd or Path.cwd())
    for path, descriptor in ((os.devnull, 0), (out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
    if most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    is_module = words[0] == "-m"
    name, sys.argv = words[is_module], list(words[is_module:])
    sys.path[0] = "" if is_module else str(Path(name).parent)
    if is_module:
        runpy.run_module(name, run_name="__main__")
    else:
        runpy.run_path(name, run_name="__main__")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
