"""Common options of the verbs, and errors in one line."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from growprune.cli.users_code import failure_in_users_code
from growprune.errors import GrowpruneError, shorten

if TYPE_CHECKING:
    from growprune.engine import Recipe, RunFolder

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
    typer.Option("--log", metavar="KIND", help="Also log to csv, tensorboard or wandb. Repeatable."),
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Run the Python file named in RUN, even if the run was started elsewhere.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]
Parameters = ParamSpec("Parameters")


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
    usage_error: Any = typer.BadParameter.__mro__[1]
    usage_error.show = _show_usage_error


def _show_usage_error(error: Any, file: Any = None) -> None:
    command = error.ctx.command_path if error.ctx else "growprune"
    message = shorten(" ".join(error.format_message().split())).rstrip(".")
    end = "" if message.endswith("?") else "."
    print(f"growprune: {message}{end} See `{command} --help`.", file=file or sys.stderr)


def _shown(error: Exception) -> tuple[str, int]:
    """The message to show for an error, and the exit code. The message is empty for a bug."""
    if not _is_for_users(error):
        if failure := failure_in_users_code(error):
            return failure, 1
        if not isinstance(error, OSError):
            return "", 1
    return shorten(" ".join(str(error).split())), 2


def _is_for_users(error: Exception) -> bool:
    if not isinstance(error, RuntimeError):
        return isinstance(error, GrowpruneError)
    from growprune.engine import PeerFailed, TrainingDiverged  # not above: `growprune --help` imports no torch

    return isinstance(error, TrainingDiverged | PeerFailed)


def trusted_origin(folder: RunFolder, trust: bool) -> dict[str, Any]:
    """Read where the recipe of a run comes from. Without --trust, refuse to run code named in another user's run."""
    from growprune.engine.source import file_of, is_source

    origin = folder.read_origin()
    named = (origin.get("source") or "", (origin.get("settings") or {}).get("method", ""))
    files = [file_of(text) for text in named if is_source(text)]
    if files and not trust and not folder.is_made_here():
        raise GrowpruneError(
            f"{folder.path} was not started by you in this folder, and its recipe is code in {files[0]}. Read that "
            f"file, then add --trust to run it"
        )
    return origin


def place(data: str, recipe: Recipe) -> dict[str, str]:
    """Turn `--data` into a setting with an absolute path, so that a run can be resumed from any folder."""
    if data and not recipe.task.reads_files:
        raise GrowpruneError(
            f"--data is not used by the task {type(recipe.task).__name__}, which reads no files; got {data}. "
            f"Leave --data out"
        )
    return {"task.data": str(Path(data).resolve())} if data else {}


def with_absolute_weights(settings: dict[str, str]) -> dict[str, str]:
    """Make the path of a weights file absolute, so that a run can be resumed from any folder."""
    return settings | ({"weights": str(Path(settings["weights"]).resolve())} if settings.get("weights") else {})
