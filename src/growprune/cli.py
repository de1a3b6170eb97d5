"""The command line. Nothing imports this file, and `growprune --help` imports no torch."""

from __future__ import annotations

import functools
import itertools
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

import growprune
from growprune.errors import GrowpruneError, shorten

if TYPE_CHECKING:
    from growprune.engine import Recipe

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A name (see `growprune list`) or path.py:function.")]
Settings = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Change a field, such as sparsity=0.8 or options.steps=4."),
]
Data = Annotated[str, typer.Option("--data", metavar="DIR", help="Where the task's data is: a folder, or a file.")]
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def one_line_errors(command: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Say what is wrong with the input in one line, and exit with 2. A bug, ours or a user's, shows its traceback."""

    @functools.wraps(command)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return command(*args, **kwargs)
        except (GrowpruneError, OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not _is_for_users(error):
                raise
            print(f"growprune: {shorten(' '.join(str(error).split()))}", file=sys.stderr)
            raise typer.Exit(2) from error

    return guarded


def _is_for_users(error: RuntimeError) -> bool:
    from growprune.engine import PeerFailed, TrainingDiverged  # not above: `growprune --help` imports no torch

    return isinstance(error, TrainingDiverged | PeerFailed)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"growprune {growprune.__version__}")
        raise typer.Exit


@app.callback()
def growprune_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train sparse neural networks by scheduled grow-and-prune."""


@app.command()
@one_line_errors
def demo(
    out: Annotated[Path, typer.Option(help="Where the run folders go.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to run.")] = 3,
) -> None:
    """Train handwritten digits dense and by C-GaP at 90 %, and compare them."""
    from growprune import console

    out = _unused(out)
    with _stopping() as should_stop:
        rows = {
            name: [_train(name, {"seed": str(seed)}, out / name / f"seed{seed}", should_stop) for seed in range(seeds)]
            for name in ("digits/dense", "digits/cyclic-90")
        }
    console.show_comparison(rows, out)


@app.command(name="list")
@one_line_errors
def list_(
    what: Annotated[str, typer.Argument(help="methods, tasks or recipes; all by default.")] = "",
    containing: Annotated[str, typer.Argument(help="Only names with this text in them.")] = "",
) -> None:
    """List methods, tasks and recipes."""
    from growprune import console
    from growprune.methods import METHODS
    from growprune.recipes import RECIPES
    from growprune.tasks import TASKS

    kinds = {
        "methods": {name: _summary(method) for name, method in METHODS.items()},
        "tasks": {name: _summary(task) for name, task in TASKS.items()},
        "recipes": {name: build().claim or _summary(build) for name, build in RECIPES.items()},
    }
    if not containing:
        kinds["recipes"] = _by_study(kinds["recipes"])
    if what and what not in kinds:
        raise GrowpruneError(f"there is no list of {what!r}; known are {', '.join(kinds)}")
    chosen = {what: kinds[what]} if what else kinds
    found = {kind: {n: text for n, text in things.items() if containing in n} for kind, things in chosen.items()}
    if not any(found.values()):
        raise GrowpruneError(f"none of the {what or 'methods, tasks and recipes'} has {containing!r} in its name")
    console.show_lists(found)


def _by_study(recipes: Mapping[str, str]) -> dict[str, str]:
    """Recipes in few rows: one that names the methods stands for those of a large study."""
    shown: dict[str, str] = {}
    for study, names in itertools.groupby(recipes, key=lambda name: name.partition("/")[0]):
        rows = [name.partition("/")[2] for name in names]
        if len(rows) <= 8:
            shown |= {f"{study}/{row}": recipes[f"{study}/{row}"] for row in rows}
        else:
            known = ", ".join(dict.fromkeys(re.split(r"-\d", row)[0] for row in rows))
            shown[f"{study}/..."] = f"{len(rows)} recipes: {known}; see `growprune list recipes {study}`"
    return shown


def _summary(thing: object) -> str:
    return (thing.__doc__ or "").strip().split("\n")[0]


@app.command()
@one_line_errors
def plan(
    recipe: RecipeName,
    data: Data = "",
    settings: Settings = [],  # noqa: B006  typer copies defaults
) -> None:
    """Show the schedule of a recipe: phases, epochs, density and FLOPs. Only a method in iterations needs the data."""
    from growprune import console
    from growprune.engine.cost import estimate
    from growprune.engine.override import override, parse_settings
    from growprune.recipes import find

    found = find(recipe)
    chosen = override(found, parse_settings(settings) | _place(data, found))
    console.show_plan(estimate(chosen), chosen.claim)


@app.command()
@one_line_errors
def train(
    recipe: RecipeName,
    out: Annotated[Path, typer.Option(help="The folder of the run; must be new or empty.")],
    data: Data = "",
    settings: Settings = [],  # noqa: B006  typer copies defaults
    resume: Annotated[bool, typer.Option("--resume", help="Go on if the folder holds this run already.")] = False,
) -> None:
    """Carry a recipe out in a new folder."""
    from growprune import console
    from growprune.engine.override import parse_settings

    with _stopping() as should_stop:
        console.show_result(_train(recipe, parse_settings(settings), out, should_stop, data, resume), out)


@app.command()
@one_line_errors
def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    extend: Annotated[int, typer.Option(min=0, help="Search this many steps more after a finished run.")] = 0,
    data: Data = "",
    settings: Settings = [],  # noqa: B006  typer copies defaults
) -> None:
    """Go on with a run exactly where it stood."""
    from growprune import console, engine
    from growprune.engine.override import override, parse_settings
    from growprune.recipes import find

    origin = engine.RunFolder(folder).read_origin()
    if not origin.get("source"):
        raise GrowpruneError(f"{folder} was started from Python: resume it with growprune.resume(recipe, folder)")
    recipe = find(origin["source"])
    # without them the recipe is not the one that was stored, and resume says so
    given = _with_absolute_weights(parse_settings(settings))
    origin["settings"] = (origin.get("settings") or {}) | given | _place(data, recipe)
    recipe = override(recipe, origin["settings"])
    if origin.get("extended"):
        recipe = recipe.extended(origin["extended"])
    with _stopping() as should_stop, console.progress() as on_event, _say_how_to_resume(folder, should_stop):
        result = engine.resume(recipe, folder, extend=extend, origin=origin, on_event=on_event, should_stop=should_stop)
    console.show_result(result, folder)


@app.command()
@one_line_errors
def inspect(
    path: Annotated[Path, typer.Argument(metavar="FILE|DIR", help="A sparse file, or a run's folder.")],
) -> None:
    """Show what a sparse file or the folder of a run holds."""
    from growprune import console

    console.show_run(path) if path.is_dir() else console.show_file(path)


@app.command()
@one_line_errors
def report(
    out: Annotated[Path, typer.Option("-o", "--out", help="The page to write, such as page.html.")],
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, folders of runs, or result.json files.")
    ] = [],  # noqa: B006  typer copies defaults
) -> None:
    """Write one page about runs: schedule, curves, comparison. It opens offline."""
    from growprune.report import find_runs, notes, write_page

    records = find_runs(runs)
    write_page(records, out)
    for note in notes(records):
        print(f"growprune: {note}", file=sys.stderr)
    print(f"{out}: {len(records)} runs, {out.stat().st_size / 1e6:.1f} MB")


@app.command()
@one_line_errors
def compare(
    what: Annotated[
        list[str], typer.Argument(metavar="RECIPE | RUN...", help="A recipe with --methods, or folders of runs.")
    ] = [],  # noqa: B006
    methods: Annotated[str, typer.Option(help="Rows: dense,rigl:erk,'gmp until=0.5',...; or all.")] = "",
    sparsities: Annotated[str, typer.Option(help="Fractions of zeros.")] = "0.9",
    seeds: Annotated[str, typer.Option(help="Seeds.")] = "0,1,2",
    epochs: Annotated[int, typer.Option(min=0, help="Of each run; those of the recipe if not given.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Where runs and tables go.")] = None,
    data: Data = "",
    settings: Settings = [],  # noqa: B006
    budget: Annotated[str, typer.Option(help="What is equal: epochs, flops, or the paper's ratio: paper.")] = "epochs",
    max_epochs: Annotated[int, typer.Option(min=0, help="The most with --budget flops; 5 times --epochs.")] = 0,
    allow: Annotated[list[str], typer.Option(metavar="FIELD", help="What may differ among rows.")] = [],  # noqa: B006
    workers: Annotated[int, typer.Option(min=1, help="How many runs at a time.")] = 1,
    retry: Annotated[bool, typer.Option("--retry", help="Run again what failed.")] = False,
    print_jobs: Annotated[
        bool, typer.Option("--print-jobs", help="Print a command for each run; run nothing.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print markdown, and write comparison.md.")] = False,
) -> None:
    """Compare methods on equal terms, or runs that are there already."""
    from growprune import console_compare
    from growprune.compare import Request, of_runs

    show = functools.partial(console_compare.show, out=out, as_markdown=markdown)
    if not methods:
        return show(of_runs([Path(path) for path in what], allow))
    request = Request(what, methods, sparsities, seeds, epochs, out, settings, data, budget, max_epochs, allow)
    jobs = request.jobs()
    if print_jobs:
        return console_compare.print_jobs(jobs)
    with _stopping() as should_stop:
        is_done = console_compare.carry_out(jobs, workers, should_stop, retry=retry)
    comparison = request.table(jobs)
    show(comparison)
    if not is_done or comparison.num_failed:
        raise typer.Exit(128 + should_stop.signal if should_stop.signal else 1)
    return None


def _place(data: str, recipe: Recipe) -> dict[str, str]:
    """The setting that `--data` stands for; absolute, so that a run can be resumed from any folder."""
    if data and not recipe.task.reads_files:
        raise GrowpruneError(
            f"--data is {data}, but the task {type(recipe.task).__name__} reads no files: leave it out"
        )
    return {"task.data": str(Path(data).resolve())} if data else {}


def _with_absolute_weights(settings: dict[str, str]) -> dict[str, str]:
    return settings | ({"weights": str(Path(settings["weights"]).resolve())} if settings.get("weights") else {})


def _train(
    source: str, settings: dict[str, str], out: Path, should_stop: StopFlag, data: str = "", go_on: bool = False
) -> dict[str, Any]:
    from growprune import console, engine
    from growprune.engine.override import override
    from growprune.engine.source import absolute
    from growprune.recipes import find

    recipe = find(source)
    settings = _with_absolute_weights(settings) | _place(data, recipe)
    if "method" in settings:
        settings["method"] = absolute(settings["method"])
    recipe = override(recipe, settings)
    origin = {"source": absolute(source), "settings": settings}  # so that resume finds it from any folder
    start = engine.resume if go_on and (out / "recipe.json").exists() else engine.train
    with console.progress(f"{source} seed {recipe.seed}") as on_event, _say_how_to_resume(out, should_stop):
        return start(recipe, out, origin=origin, on_event=on_event, should_stop=should_stop)


class StopFlag:
    """Remembers a signal that asked to stop; calling it tells whether there was one. A second one ends it at once."""

    def __init__(self) -> None:
        self.signal = 0
        self.is_seen = False
        """Whether the run has noticed, and is about to save and end."""

    def __call__(self) -> bool:
        self.is_seen = self.signal != 0
        return self.is_seen

    def receive(self, number: int, frame: object) -> None:
        del frame
        if self.signal:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal = number


@contextmanager
def _stopping() -> Iterator[StopFlag]:
    """While it lasts, Ctrl-C and SIGTERM ask to stop instead of breaking off."""
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
    """A process that waits for another cannot look at the flag: end it if it does not soon.

    Nothing is lost: what was saved is whole, and what was not is trained again.
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
def _say_how_to_resume(folder: Path, flag: StopFlag) -> Iterator[None]:
    from growprune.engine import Interrupted

    try:
        yield
    except Interrupted as stop:
        print(f"growprune: stopped and saved; go on with `growprune resume {folder}`", file=sys.stderr)
        raise typer.Exit(128 + flag.signal) from stop


def _unused(path: Path) -> Path:
    """The path, or the first of path-2, path-3, ... that does not exist."""
    candidates = (path if i == 1 else path.with_name(f"{path.name}-{i}") for i in range(1, 10**6))
    return next(candidate for candidate in candidates if not candidate.exists())


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Without the place in our code, which is of no use to who reads it."""
    del category, filename, lineno, line
    return f"growprune: warning: {message}\n"


def main() -> None:
    warnings.formatwarning = _format_warning
    # what DDP says of the gradients of 1 x 1 convolutions; users can do nothing about it
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    try:
        app()
    finally:
        if "growprune.engine" in sys.modules:
            sys.modules["growprune.engine"].leave()


if __name__ == "__main__":
    main()
