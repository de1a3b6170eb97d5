"""What the verbs share: the options that several of them take, and errors in one line."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer

from growprune.errors import GrowpruneError, shorten

if TYPE_CHECKING:
    from growprune.engine import Recipe

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A name (see `growprune list`) or path.py:function.")]
Settings = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Change a field, such as sparsity=0.8 or options.steps=4."),
]
Data = Annotated[str, typer.Option("--data", metavar="DIR", help="Where the task's data is: a folder, or a file.")]
Log = Annotated[
    list[str],
    typer.Option("--log", metavar="KIND", help="Also write csv or tensorboard into the folder; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")]
Parameters = ParamSpec("Parameters")


def one_line_errors(command: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Say what is wrong with the input in one line, and exit with 2. A bug, ours or a user's, shows its traceback."""

    @functools.wraps(command)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (GrowpruneError, OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not _is_for_users(error):
                raise
            print(f"growprune: {shorten(' '.join(str(error).split()))}", file=sys.stderr)
            raise typer.Exit(2) from error

    return guarded


def _is_for_users(error: RuntimeError) -> bool:
    from growprune.engine import PeerFailed, TrainingDiverged  # not above: `growprune --help` imports no torch

    return isinstance(error, TrainingDiverged | PeerFailed)


def place(data: str, recipe: Recipe) -> dict[str, str]:
    """The setting that `--data` stands for; absolute, so that a run can be resumed from any folder."""
    if data and not recipe.task.reads_files:
        raise GrowpruneError(
            f"--data is {data}, but the task {type(recipe.task).__name__} reads no files: leave it out"
        )
    return {"task.data": str(Path(data).resolve())} if data else {}


def with_absolute_weights(settings: dict[str, str]) -> dict[str, str]:
    """A file of weights too is found from any folder."""
    return settings | ({"weights": str(Path(settings["weights"]).resolve())} if settings.get("weights") else {})
