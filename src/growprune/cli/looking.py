"""The verbs that show methods, tasks, recipes and schedules: list, plan."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from growprune.cli.app import AsJson, Data, RecipeName, Settings, one_line_errors
from growprune.cli.screen import new_table, out, print_json, size
from growprune.errors import GrowpruneError
from growprune.plan.phases import Row, fold

if TYPE_CHECKING:
    from growprune.engine.cost import Cost, Estimate

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
    if what and what not in kinds:
        raise GrowpruneError(f"KIND must be one of {', '.join(kinds)}, got {what!r}")
    chosen = {what: kinds[what]} if what else kinds
    found = {kind: {n: text for n, text in things.items() if containing in n} for kind, things in chosen.items()}
    if not any(found.values()):
        raise GrowpruneError(f"no {what or 'methods, tasks or recipes'} with {containing!r} in the name")
    print_json(found) if as_json else _show_lists(found)


def _summary(thing: object) -> str:
    return (thing.__doc__ or "").strip().split("\n")[0]


def _show_lists(kinds: Mapping[str, Mapping[str, str]]) -> None:
    for kind, things in kinds.items():
        table = Table(title=kind, title_justify="left", show_header=False, box=None, padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column()
        for name, text in things.items():
            table.add_row(name, Text(text, no_wrap=name.endswith("/..."), overflow="ellipsis"))
        out().print(table)
        if folded := [name for name in things if name.endswith("/...")]:
            out().print(f"  Show a group: growprune list {kind} {folded[0].removesuffix('/...')}", highlight=False)


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

    found = find(recipe)
    chosen = override(found, with_places(parse_settings(settings), found, data))
    priced = estimate(chosen)
    if as_json:
        print_json(_plan_content(priced, recipe, chosen.claim))
    else:
        _show_plan(priced, chosen.claim, every=every)


def _plan_content(estimate: Estimate, name: str, claim: str) -> dict[str, Any]:
    """A plan and its costs as JSON. Similar phases share a row."""
    rows = [
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
        for row, costs in _with_costs(fold(cost.scheduled for cost in estimate.costs), estimate)
    ]
    return {
        "recipe": name,
        "claim": claim,
        "method": estimate.plan.method.__name__,
        "parts": {part.name: list(part.tensors) for part in estimate.plan.partition},
        "is_exact": estimate.is_exact,
        "rows": rows,
        "totals": {
            "epochs": estimate.epochs,
            "peak_density": estimate.peak_density,
            "training_flops": estimate.training_flops,
            "dense_forward_flops": estimate.dense_flops,
            "final_forward_flops": estimate.costs[-1].forward_flops,
            "bytes": estimate.memory.per_rank(),
            "bytes_per_rank": {str(ranks): estimate.memory.per_rank(ranks) for ranks in _ranks(estimate)},
        },
    }


def _show_plan(estimate: Estimate, claim: str, *, every: bool) -> None:
    from growprune.runs.result import scaled

    if claim:
        out().print(claim, markup=False, highlight=False)
    about = "" if estimate.is_exact else "~"
    shown = new_table("stage", "branch", "edits", "epochs", "density", "FLOPs", "training", text="edits")
    shown.title = f"{estimate.plan.method.__name__}, {len(estimate.plan.partition)} parts"
    shown.caption = "FLOPs: forward pass, one example; training: all epochs, one example"
    phases = [cost.scheduled for cost in estimate.costs]
    rows = [Row((phase,)) for phase in phases] if every else fold(phases, SCREEN)
    for row, costs in _with_costs(rows, estimate):
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
    if len(rows) < len(estimate.costs):
        out().print(f"{len(estimate.costs)} phases in {len(rows)} rows; --all shows each.", highlight=False)
    dense = 3 * estimate.dense_flops * estimate.epochs
    share = f", {estimate.training_flops / dense:.3f} of the FLOPs of dense training" if dense else ""
    inference = estimate.costs[-1].forward_flops / estimate.dense_flops
    out().print(
        f"{estimate.epochs:g} epochs in total{share}. Peak density {estimate.peak_density:.3f}. "
        f"Inference at {about}{inference:.3f} of the dense FLOPs."
    )
    each = ", ".join(f"{size(estimate.memory.per_rank(r))} on each of {r} ranks" for r in _ranks(estimate))
    out().print(
        f"Peak training memory {about}{size(estimate.memory.per_rank())} without activations: values, gradients, "
        f"optimizer state, masks" + (f"; with shard=fsdp, {each}." if each else "."),
        highlight=False,
    )


def _with_costs(rows: Iterable[Row], estimate: Estimate) -> Iterator[tuple[Row, list[Cost]]]:
    """Groups of similar phases, with the cost of each phase."""
    costs = iter(estimate.costs)
    for row in rows:
        yield row, [next(costs) for _ in row.phases]


def _ranks(estimate: Estimate) -> tuple[int, ...]:
    return (2, 8, 64) if estimate.can_be_sharded else ()
