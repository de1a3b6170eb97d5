"""The verbs that show methods, tasks, recipes and schedules: list, plan."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from growprune.cli.app import AsJson, Data, RecipeName, Settings, one_line_errors
from growprune.cli.screen import new_table, out, print_json, size
from growprune.errors import GrowpruneError
from growprune.plan import Row, fold
from growprune.plan.settings import one_of

if TYPE_CHECKING:
    from growprune.engine.cost import Cost

SCREEN = 12
"""The most rows of a plan before phases that edit different parts share a row: about a screen."""


@one_line_errors
def list_(
    what: Annotated[str, typer.Argument(metavar="KIND", help="methods, tasks or recipes. Default: all.")] = "",
    containing: Annotated[str, typer.Argument(metavar="NAME", help="Show only names that contain this string.")] = "",
    as_json: AsJson = False,
) -> None:
    """List methods, tasks and recipes."""
    from growprune.methods import METHODS
    from growprune.recipes import MEASURED, RECIPES
    from growprune.tasks import TASKS

    claims = {name: build().claim for name, build in RECIPES.items()}
    kinds = {
        "methods": {name: _summary(method) for name, method in METHODS.items()},
        "tasks": {name: _summary(task) for name, task in TASKS.items()},
        "recipes": {name: claims[name] or _summary(build) for name, build in RECIPES.items()},
    }
    if not containing and not as_json:
        for study, group in itertools.groupby(claims, key=lambda name: name.partition("/")[0]):
            names = [name for name in group if claims[name]]  # others are listed one by one
            methods = dict.fromkeys(re.split(r"-\d", name.partition("/")[2])[0] for name in names)
            for name in names:
                del kinds["recipes"][name]
            if names:
                count = sum(name in MEASURED for name in names) or "none"
                kinds["recipes"][f"{study}/..."] = f"{len(names)} recipes, {count} measured: {', '.join(methods)}"
    chosen = {what: kinds[one_of("KIND", what, kinds)]} if what else kinds
    found = {kind: {n: text for n, text in things.items() if containing in n} for kind, things in chosen.items()}
    if not any(found.values()):
        raise GrowpruneError(f"no {what or 'methods, tasks or recipes'} with {containing!r} in the name")
    if as_json:
        print_json(found)
        return
    for kind, things in found.items():
        table = Table(title=kind, title_justify="left", show_header=False, box=None, padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column()
        for name, text in things.items():
            table.add_row(name, Text(text, no_wrap=name.endswith("/..."), overflow="ellipsis"))
        out().print(table)
        if folded := [name for name in things if name.endswith("/...")]:
            out().print(f"  Show a group: growprune list {kind} {folded[0].removesuffix('/...')}", highlight=False)


def _summary(thing: object) -> str:
    return (thing.__doc__ or "").strip().split("\n")[0]


@one_line_errors
def plan(
    recipe: RecipeName,
    data: Data = "",
    settings: Settings = [],  # noqa: B006  typer copies defaults
    as_json: AsJson = False,
    every: Annotated[bool, typer.Option("--all", help="Show every phase in a row of its own.")] = False,
) -> None:
    """Show the schedule, density and FLOPs without training.

    Data is needed only by methods that count iterations.
    """
    from growprune.engine.cost import estimate
    from growprune.engine.override import override, parse_settings, with_places
    from growprune.recipes import find
    from growprune.runs.result import scaled

    found = find(recipe)
    chosen = override(found, with_places(parse_settings(settings), found, data))
    priced = estimate(chosen)
    method, parts = priced.plan.method.__name__, priced.plan.partition
    phases = [cost.scheduled for cost in priced.costs]
    ranks = (2, 8, 64) if priced.can_be_sharded else ()
    if as_json:
        folded = [
            {
                "stage": row.first.stage,
                "branch": row.first.branch,
                "edits": str(row),
                "phases": len(costs),
                "epochs": sum(cost.epochs for cost in costs),
                "density": [costs[0].density, costs[-1].density],
                "forward_flops": [costs[0].forward_flops, costs[-1].forward_flops],
                "training_flops": sum(cost.training_flops for cost in costs),
            }
            for row, costs in _with_costs(fold(phases), priced.costs)
        ]
        totals = {
            "epochs": priced.epochs,
            "peak_density": priced.peak_density,
            "training_flops": priced.training_flops,
            "dense_forward_flops": priced.dense_flops,
            "final_forward_flops": priced.costs[-1].forward_flops,
            "bytes": priced.bytes_per_rank(),
            "bytes_per_rank": {str(number): priced.bytes_per_rank(number) for number in ranks},
        }
        about_plan = {"recipe": recipe, "claim": chosen.claim, "method": method, "is_exact": priced.is_exact}
        tensors = {part.name: list(part.tensors) for part in parts}
        print_json({**about_plan, "parts": tensors, "rows": folded, "totals": totals})
        return
    if chosen.claim:
        out().print(chosen.claim, markup=False, highlight=False)
    about = "" if priced.is_exact else "~"
    shown = new_table("stage", "branch", "edits", "epochs", "density", "FLOPs", "training", text="edits")
    shown.title = f"{method}, {len(parts)} parts"
    shown.caption = "FLOPs: forward pass, one example; training: all epochs, one example"
    rows = [Row((phase,)) for phase in phases] if every else fold(phases, SCREEN)
    for row, costs in _with_costs(rows, priced.costs):
        ends = costs[0], costs[-1]  # one cost is shown if both are alike
        shown.add_row(
            str(row.first.stage),
            "" if row.first.branch is None else str(row.first.branch),
            str(row) if len(costs) == 1 else f"{len(costs)} x {row}",
            f"{sum(cost.epochs for cost in costs):.4g}",
            " to\n".join(dict.fromkeys(f"{cost.density:.4f}" for cost in ends)),
            " to\n".join(dict.fromkeys(about + scaled(cost.forward_flops) for cost in ends)),
            about + scaled(sum(cost.training_flops for cost in costs)),
        )
    out().print(shown)
    if len(rows) < len(phases):
        out().print(f"{len(phases)} phases in {len(rows)} rows; --all shows each.", highlight=False)
    dense = 3 * priced.dense_flops * priced.epochs
    share = f", {priced.training_flops / dense:.3f} of the FLOPs of dense training" if dense else ""
    inference = priced.costs[-1].forward_flops / priced.dense_flops
    out().print(
        f"{priced.epochs:g} epochs in total{share}. Peak density {priced.peak_density:.3f}. "
        f"Inference at {about}{inference:.3f} of the dense FLOPs."
    )
    each = ", ".join(f"{size(priced.bytes_per_rank(number))} on each of {number} ranks" for number in ranks)
    out().print(
        f"Peak training memory {about}{size(priced.bytes_per_rank())} without activations: values, gradients, "
        f"optimizer state, masks" + (f"; with shard=fsdp, {each}." if each else "."),
        highlight=False,
    )


def _with_costs(rows: Iterable[Row], costs: Iterable[Cost]) -> Iterator[tuple[Row, list[Cost]]]:
    """Groups of similar phases, with the cost of each phase."""
    left = iter(costs)
    for row in rows:
        yield row, [next(left) for _ in row.phases]
