"""The verbs that look at what there is: list, plan, inspect."""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Annotated

import typer

from growprune.cli.app import AsJson, Data, RecipeName, Settings, one_line_errors, place
from growprune.errors import GrowpruneError


@one_line_errors
def list_(
    what: Annotated[str, typer.Argument(help="methods, tasks or recipes; all by default.")] = "",
    containing: Annotated[str, typer.Argument(help="Only names with this text in them.")] = "",
    as_json: AsJson = False,
) -> None:
    """List methods, tasks and recipes."""
    from growprune.cli import console
    from growprune.methods import METHODS
    from growprune.recipes import RECIPES
    from growprune.tasks import TASKS

    kinds = {
        "methods": {name: _summary(method) for name, method in METHODS.items()},
        "tasks": {name: _summary(task) for name, task in TASKS.items()},
        "recipes": {name: build().claim or _summary(build) for name, build in RECIPES.items()},
    }
    if not containing and not as_json:
        kinds["recipes"] = _by_study(kinds["recipes"], {name for name, build in RECIPES.items() if build().claim})
    if what and what not in kinds:
        raise GrowpruneError(f"there is no list of {what!r}; known are {', '.join(kinds)}")
    chosen = {what: kinds[what]} if what else kinds
    found = {kind: {n: text for n, text in things.items() if containing in n} for kind, things in chosen.items()}
    if not any(found.values()):
        raise GrowpruneError(f"none of the {what or 'methods, tasks and recipes'} has {containing!r} in its name")
    console.print_json(found) if as_json else console.show_lists(found)


def _by_study(recipes: Mapping[str, str], rows: Container[str]) -> dict[str, str]:
    """Recipes in few lines: those that are rows of a study, which claim something, in one that names their methods."""
    shown: dict[str, str] = {}
    for study, group in itertools.groupby(recipes, key=lambda name: name.partition("/")[0]):
        names = [*group]
        if not any(name in rows for name in names):
            shown |= {name: recipes[name] for name in names}
        else:
            methods = dict.fromkeys(re.split(r"-\d", name.partition("/")[2])[0] for name in names)
            shown[f"{study}/..."] = f"{len(names)} recipes: {', '.join(methods)}"
    return shown


def _summary(thing: object) -> str:
    return (thing.__doc__ or "").strip().split("\n")[0]


@one_line_errors
def plan(
    recipe: RecipeName,
    data: Data = "",
    settings: Settings = [],  # noqa: B006  typer copies defaults
    as_json: AsJson = False,
) -> None:
    """Show the schedule of a recipe: phases, epochs, density and FLOPs. Only a method in iterations needs the data."""
    from growprune.cli import console
    from growprune.engine.cost import estimate
    from growprune.engine.override import override, parse_settings
    from growprune.recipes import find

    found = find(recipe)
    chosen = override(found, parse_settings(settings) | place(data, found))
    priced = estimate(chosen)
    if as_json:
        console.print_json(console.plan_content(priced, recipe, chosen.claim))
    else:
        console.show_plan(priced, chosen.claim)


@one_line_errors
def inspect(
    path: Annotated[Path, typer.Argument(metavar="FILE|DIR", help="A sparse file, or a run's folder.")],
    as_json: AsJson = False,
) -> None:
    """Show what a sparse file or the folder of a run holds."""
    from growprune.cli import console

    if path.is_dir():
        console.print_json(console.run_content(path)) if as_json else console.show_run(path)
    else:
        console.show_file(path, as_json=as_json)
