"""Common options of the verbs, errors in one line, and stopping: Ctrl-C and SIGTERM write a checkpoint and exit."""

from __future__ import annotations

import functools
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from growprune.errors import GrowpruneError, is_users_file, shorten

if TYPE_CHECKING:
    from growprune.engine import RunFolder


RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe name (see `growprune list`) or path.py:function.")
]
Settings = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Change a recipe field, such as sparsity=0.8. Repeatable."),
]
Data = Annotated[str, typer.Option("--data", metavar="DIR", help="Folder or file with the task's data.")]
Log = Annotated[
    list[str],
    typer.Option("--log", metavar="KIND", help="Also log to csv or tensorboard. Repeatable."),
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Run the Python file named in RUN, even if the run was started elsewhere.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]
Parameters = ParamSpec("Parameters")

MAX_PLACES = 4
"""Maximum number of lines of users' code to show; the innermost ones."""


def one_line_errors(command: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Show invalid input in one line (exit code 2), and an error in a user's code with its file and line (exit code 1).

    Any other error is a bug in growprune and shows its traceback.
    """

    @functools.wraps(command)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except typer.Exit:
            raise
        except Exception as error:
            shown, code = _shown(error)
            if not shown:
                raise
            print(f"growprune: {shown}", file=sys.stderr)
            raise typer.Exit(code) from error

    return guarded


def show_usage_errors_in_one_line() -> None:
    """Replace the usage errors of typer, such as an unknown option, by one line with a hint to --help.

    The class comes from the public `BadParameter`: newer versions of typer bring their own copy of click.
    """

    def show(error: Any, file: Any = None) -> None:
        command = error.ctx.command_path if error.ctx else "growprune"
        message = shorten(" ".join(error.format_message().split())).rstrip(".")
        end = "" if message.endswith("?") else "."
        print(f"growprune: {message}{end} See `{command} --help`.", file=file or sys.stderr)

    usage_error: Any = typer.BadParameter.__mro__[1]
    usage_error.show = show


def _shown(error: Exception) -> tuple[str, int]:
    """The message to show for an error, and the exit code. The message is empty for a bug."""
    is_for_users = isinstance(error, GrowpruneError)
    if isinstance(error, RuntimeError):
        from growprune.engine import PeerFailed, TrainingDiverged  # not above: `growprune --help` imports no torch

        is_for_users = isinstance(error, TrainingDiverged | PeerFailed)
    if not is_for_users:
        if failure := _failure_in_users_code(error):
            return failure, 1
        if not isinstance(error, OSError):
            return "", 1
    return shorten(" ".join(str(error).split())), 2


def _failure_in_users_code(error: Exception) -> str:
    """The file, line and message of an error that came through users' code. Empty if no user code is in the traceback.

    Users' code is all outside growprune, the standard library and installed packages.
    """
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        theirs = [traceback.FrameSummary(error.filename, error.lineno, "<module>", line=error.text)]
        message, innermost = f"SyntaxError: {error.msg}", theirs[-1]
    else:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if is_users_file(frame.filename)]
        if not theirs:
            return ""
        message, innermost = f"{type(error).__name__}: {error}", frames[-1]
    shown = theirs[-MAX_PLACES:] + ([] if innermost is theirs[-1] else [innermost])
    first = f"{theirs[-1].filename}, line {theirs[-1].lineno}: {shorten(' '.join(message.split()))}"
    return "\n".join([first, *(f'  File "{p.filename}", line {p.lineno}, in {p.name}\n    {p.line}' for p in shown)])


def trusted_origin(folder: RunFolder, trust: bool) -> dict[str, Any]:
    """Read where the recipe of a run comes from. Without --trust, refuse to run code named in another user's run."""
    from growprune.engine.override import file_of, is_source

    origin = folder.read_origin()
    named = (origin.get("source") or "", (origin.get("settings") or {}).get("method", ""))
    files = [file_of(text) for text in named if is_source(text)]
    if files and not trust and not folder.is_made_here():
        raise GrowpruneError(
            f"{folder.path} was not started by you in this folder, and its recipe is code in {files[0]}. Read that "
            f"file, then add --trust to run it"
        )
    return origin


def check_new_folder(folder: Path) -> None:
    """Raise unless a folder to write is new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise GrowpruneError(f"--out must be a new or empty folder, but {folder} exists. Choose another --out")


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
