"""The command line. Nothing imports it, and `growprune --help` imports no torch.

Each verb is a function in the file of its group. VERBS lists them in the order of the help.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Annotated

import typer

import growprune
from growprune.cli.app import show_usage_errors_in_one_line
from growprune.cli.comparing import compare, report
from growprune.cli.deploying import convert, deploy
from growprune.cli.inspecting import doctor, inspect
from growprune.cli.looking import list_, plan
from growprune.cli.pruning import perplexity, prune
from growprune.cli.training import demo, resume, train

VERBS: dict[str, Callable[..., None]] = {
    verb.__name__.removesuffix("_"): verb
    for verb in (demo, list_, plan, train, resume, inspect, prune, perplexity, convert, report, compare, deploy, doctor)
}

show_usage_errors_in_one_line()
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
for name, verb in VERBS.items():
    app.command(name=name)(verb)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"growprune {growprune.__version__}")
        raise typer.Exit


@app.callback()
def growprune_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train sparse neural networks: grow-and-prune and its baselines."""


def main() -> None:
    # without the line in our code, which does not help the reader
    warnings.formatwarning = lambda message, *_: f"growprune: warning: {message}\n"
    # DDP warns about the gradients of 1 x 1 convolutions; users can do nothing about it
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    app()
