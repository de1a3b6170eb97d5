"""The verbs that train: demo, train, resume."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from growprune.cli.app import (
    Data,
    Log,
    RecipeName,
    Settings,
    StopFlag,
    Trust,
    one_line_errors,
    say_how_to_resume,
    stopping,
    trusted_origin,
)
from growprune.cli.screen import out as console
from growprune.cli.screen import progress, say, show_result
from growprune.errors import GrowpruneError


@one_line_errors
def demo(
    out: Annotated[Path, typer.Option(help="Folder to write the runs to.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 3,
) -> None:
    """Train digits dense and 90 % sparse, and print one table."""
    import torch

    from growprune.runs.result import deviation, mean, plus_minus

    torch.set_num_threads(1)  # more threads only slow down such a small model

    names = (out if number == 1 else out.with_name(f"{out.name}-{number}") for number in itertools.count(1))
    out = next(path for path in names if not path.exists())
    with stopping() as should_stop:
        rows = {
            name: [_train(name, {"seed": str(seed)}, out / name / f"seed{seed}", should_stop) for seed in range(seeds)]
            for name in ("digits/dense", "digits/gradual-90")
        }
    table = Table(title=f"Handwritten digits, {seeds} seeds, test data")
    for name in ("recipe", "accuracy %", "non-zeros", "FLOPs", "file bytes", "seconds"):
        table.add_column(name, justify="left" if name == "recipe" else "right", no_wrap=True)
    for name, results in rows.items():
        accuracy = [result["test"]["accuracy"] for result in results]
        total = results[0]["sparsity"]["totals"]
        table.add_row(
            name,
            plus_minus(mean(accuracy), deviation(accuracy), 2),
            f"{total['alive']:,}",
            f"{total['flops_sparse'] / 1e6:.2f} M",
            f"{results[0]['file_bytes']:,}",
            f"{statistics.mean(result['seconds'] for result in results):.1f}",
        )
    console().print(table)
    dense, sparse = ([r["test"]["accuracy"] for r in results] for results in rows.values())
    gaps = [s - d for s, d in zip(sparse, dense, strict=True)]
    gap = plus_minus(mean(gaps), deviation(gaps), 2, "+")
    say(f"sparse minus dense, same epochs: {gap} points. Runs are in {out}.")


@one_line_errors
def train(
    recipe: RecipeName,
    out: Annotated[Path, typer.Option(help="Run folder to write. Must be new or empty.")],
    data: Data = "",
    settings: Settings = [],  # noqa: B006  typer copies defaults
    resume: Annotated[bool, typer.Option("--resume", help="Resume if --out already has this run.")] = False,
    log: Log = [],  # noqa: B006
) -> None:
    """Train a recipe and write the run to --out."""
    from growprune.engine.override import parse_settings

    with stopping() as should_stop:
        chosen = parse_settings(settings) | _logged(log)
        show_result(_train(recipe, chosen, out, should_stop, data, resume), out)


@one_line_errors
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    data: Data = "",
    settings: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="Change how it runs, such as storage=compact. Repeatable."),
    ] = [],  # noqa: B006  typer copies defaults
    log: Log = [],  # noqa: B006
    trust: Trust = False,
) -> None:
    """Resume a run from its last checkpoint."""
    from growprune import engine
    from growprune.engine.override import digests, override, parse_settings, with_places
    from growprune.recipes import find

    origin = trusted_origin(engine.RunFolder(folder), trust)
    if not origin.get("source"):
        raise GrowpruneError(f"{folder} was started from Python. Resume it with growprune.resume(recipe, folder)")
    recipe = find(origin["source"])
    # without the stored settings the recipe would differ from the stored one, and resume would refuse it
    given = with_places(parse_settings(settings) | _logged(log), recipe, data)
    origin["settings"] = (origin.get("settings") or {}) | given
    files = digests(origin["source"], origin["settings"].get("method", ""))
    changed = [name for name, digest in files.items() if origin.get("files", {}).get(name, digest) != digest]
    if changed:
        print(f"growprune: warning: {', '.join(changed)} changed since this run was started", file=sys.stderr)
    origin["files"] = files
    recipe = override(recipe, origin["settings"])
    title = f"{origin['source']} seed {recipe.seed}"
    with stopping() as stop, say_how_to_resume(folder, stop), progress(title) as on_event:
        result = engine.resume(recipe, folder, origin=origin, on_event=on_event, should_stop=stop)
    show_result(result, folder)


def _logged(names: list[str]) -> dict[str, str]:
    """Turn `--log` into a setting. It is stored with the run, so that a resumed run keeps logging."""
    return {"log": json.dumps(names)} if names else {}


def _train(
    source: str, settings: dict[str, str], out: Path, should_stop: StopFlag, data: str = "", go_on: bool = False
) -> dict[str, Any]:
    from growprune import engine
    from growprune.engine.folder import HoldsRun
    from growprune.engine.override import absolute, digests, override, with_places
    from growprune.recipes import find

    recipe = find(source)
    settings = with_places(settings, recipe, data)
    if "method" in settings:
        settings["method"] = absolute(settings["method"])
    recipe = override(recipe, settings)
    # so that resume finds the recipe from any folder, and tables say whether the user's code was the same
    origin: dict[str, Any] = {"source": absolute(source), "settings": settings}
    origin["files"] = digests(source, settings.get("method", ""))
    with say_how_to_resume(out, should_stop), progress(f"{source} seed {recipe.seed}") as on_event:
        how: dict[str, Any] = {"origin": origin, "on_event": on_event, "should_stop": should_stop}
        try:
            return (engine.resume if go_on and (out / "recipe.json").exists() else engine.train)(recipe, out, **how)
        except HoldsRun:
            if not go_on:
                raise
            return engine.resume(recipe, out, **how)  # another process has started it in the meantime
