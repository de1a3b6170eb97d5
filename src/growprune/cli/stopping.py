"""Ctrl-C and SIGTERM: write a checkpoint and exit, so that the run can be resumed."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer


class StopFlag:
    """Remembers a signal; calling it returns True after one arrived. A second signal ends the process at once."""

    def __init__(self) -> None:
        self.signal = 0
        self.is_seen = False
        """True once the run has seen the signal and is about to save and exit."""

    def __call__(self) -> bool:
        self.is_seen = self.signal != 0
        return self.is_seen

    def receive(self, number: int, _frame: object) -> None:
        if self.signal:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal = number


@contextmanager
def stopping() -> Iterator[StopFlag]:
    """Inside this context, Ctrl-C and SIGTERM set a flag instead of ending the process."""
    flag = StopFlag()
    before = {number: signal.signal(number, flag.receive) for number in (signal.SIGINT, signal.SIGTERM)}
    if os.environ.get("WORLD_SIZE", "1") != "1":
        _end_soon_after_a_signal(flag)
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_soon_after_a_signal(flag: StopFlag, grace_seconds: float = 3.0) -> None:
    """End a process that does not check the flag soon after a signal, because it waits for another process.

    Nothing is lost: checkpoints are written atomically, and the epochs after the last one are trained again.
    """
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender)  # written to at once, even while the main thread waits inside a library

    def watch() -> None:
        number = os.read(receiver, 1)[0]
        time.sleep(grace_seconds)
        if not flag.is_seen:
            os._exit(128 + number)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def say_how_to_resume(folder: Path, flag: StopFlag) -> Iterator[None]:
    from growprune.engine import Interrupted

    try:
        yield
    except Interrupted as stop:
        command = shlex.join(["growprune", "resume", str(folder)])
        print(f"growprune: Interrupted; checkpoint saved. Resume with: {command}", file=sys.stderr)
        raise typer.Exit(128 + flag.signal) from stop
