"""What the command line shows: tables, and progress (bars on a terminal, plain lines elsewhere)."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from growprune import file
from growprune.engine import Event, RunFolder
from growprune.engine.cost import Cost, Estimate
from growprune.folding import Row, fold

is_first = os.environ.get("RANK", "0") == "0"
"""Under torchrun, the first process speaks for all."""
out = Console(quiet=not is_first, markup=False, emoji=False)  # texts are shown as they are
err = Console(stderr=True, quiet=not is_first, markup=False, emoji=False)


@contextmanager
def progress(title: str = "") -> Iterator[Callable[[Event], None]]:
    """Gives the listener that shows a run as it goes."""
    if not err.is_terminal:
        yield lambda event: _show_line(title, event)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as bars:
        whole, phase = bars.add_task(title, total=None), bars.add_task("", total=None)
        others: dict[int, TaskID] = {}

        def listen(event: Event) -> None:
            if "rank" in event:
                _show_other(bars, others, event)
            elif event["event"] == "phase":
                bars.update(whole, completed=event["index"], total=event["last"] + 1)
                bars.reset(
                    phase,
                    description=f"{event['alive']:,} alive: {event['edits']}",
                    total=event["iterations"] or 1,
                )
            elif event["event"] == "iteration":
                bars.update(phase, completed=event["iteration"], total=event["iterations"])
            elif event["event"] == "warning":
                bars.console.print(f"warning: {event['message']}", style="yellow")

        yield listen


def _show_other(bars: Progress, others: dict[int, TaskID], event: Event) -> None:
    """A bar for the branch that another process trains."""
    rank = event["rank"]
    if rank not in others:
        others[rank] = bars.add_task("", total=None)
    if event["event"] == "phase":
        description = f"branch {event['branch']} (rank {rank}): {event['edits']}"
        bars.reset(others[rank], description=description, total=event["iterations"] or 1)
    elif event["event"] == "epoch":
        bars.update(others[rank], completed=event["done"])


def _show_line(title: str, event: Event) -> None:
    match event:
        case {"event": "phase"} if event["epochs"] or event["index"] in (0, event["last"]):
            length = f"{event['epochs']} epochs" if event["epochs"] else f"{event['iterations']} iterations"
            say = f"stage {event['stage']}: {event['edits']}; {event['alive']:,} alive, {length}"
        case {"event": "epoch"}:
            validation = f", {_metrics(event['validation'])} (validation)" if "validation" in event else ""
            say = f"epoch {event['epoch']}: loss {event['loss']:.4f}{validation}"
        case {"event": "warning"}:
            say = f"warning: {event['message']}"
        case {"event": "resumed"}:
            say = f"resumed from checkpoint {event['number']}"
        case _:
            return
    who = [title, f"rank {event['rank']}, branch {event['branch']}" if "rank" in event else ""]
    err.print(": ".join(filter(None, [*who, say])), markup=False, highlight=False, soft_wrap=True)


def show_comparison(rows: Mapping[str, list[dict[str, Any]]], folder: Path) -> None:
    """One row per recipe, mean and standard deviation over its seeds."""
    seeds = len(next(iter(rows.values())))
    table = Table(title=f"Handwritten digits, {seeds} seeds, test data")
    for name in ("recipe", "accuracy %", "non-zeros", "FLOPs", "file bytes", "seconds"):
        table.add_column(name, justify="left" if name == "recipe" else "right", no_wrap=True)
    for name, results in rows.items():
        accuracy = [result["test"]["accuracy"] for result in results]
        total = results[0]["sparsity"]["totals"]
        table.add_row(
            name,
            _spread(accuracy),
            f"{total['alive']:,}",
            f"{total['flops_sparse'] / 1e6:.2f} M",
            f"{results[0]['file_bytes']:,}",
            f"{statistics.mean(result['seconds'] for result in results):.1f}",
        )
    out.print(table)
    dense, sparse = ([r["test"]["accuracy"] for r in results] for results in rows.values())
    gaps = [s - d for s, d in zip(sparse, dense, strict=True)]
    out.print(f"C-GaP minus dense, same total epochs: {_spread(gaps, sign='+')} points. Runs are in {folder}.")


def show_lists(kinds: Mapping[str, Mapping[str, str]]) -> None:
    """By kind, names and what they are."""
    for kind, things in kinds.items():
        table = Table(title=kind, title_justify="left", show_header=False, box=None, padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column()
        for name, text in things.items():
            table.add_row(name, text)
        out.print(table)


def show_plan(estimate: Estimate, claim: str = "") -> None:
    if claim:
        out.print(claim, markup=False, highlight=False)
    about = "" if estimate.is_exact else "~"
    table = _table("stage", "branch", "edits", "epochs", "density", "FLOPs", "training")
    table.title = f"{estimate.plan.method.__name__}, {len(estimate.plan.partition)} parts"
    table.caption = "FLOPs: forward, for one example; training: of all epochs, for one example"
    costs = iter(estimate.costs)
    for row in fold(cost.scheduled for cost in estimate.costs):
        table.add_row(*_cells(row, [next(costs) for _ in row.phases], about))
    out.print(table)
    dense = 3 * estimate.dense_flops * estimate.epochs
    share = f", {estimate.training_flops / dense:.3f} of dense training for as many" if dense else ""
    inference = estimate.costs[-1].forward_flops / estimate.dense_flops
    out.print(
        f"{estimate.epochs:g} epochs in all{share}; at most {estimate.peak_density:.3f} of the weights live; "
        f"inference at {about}{inference:.3f} of the dense FLOPs."
    )


def _cells(row: Row, costs: list[Cost], about: str) -> Iterator[str]:
    """Of phases that are alike: what they do, how often, and what that costs, from the first to the last."""
    yield str(row.first.stage)
    yield "" if row.first.branch is None else str(row.first.branch)
    yield str(row) if len(costs) == 1 else f"{len(costs)} x {row}"
    yield f"{sum(cost.epochs for cost in costs):.4g}"
    yield " to\n".join(dict.fromkeys(f"{cost.density:.4f}" for cost in (costs[0], costs[-1])))
    yield " to\n".join(dict.fromkeys(about + _short(cost.forward_flops) for cost in (costs[0], costs[-1])))
    yield about + _short(sum(cost.training_flops for cost in costs))


def show_result(result: dict[str, Any], folder: Path) -> None:
    total = result["sparsity"]["totals"]
    out.print(f"test: {_metrics(result['test'])}")
    if result["best"]:
        best = result["best"]
        out.print(f"best by validation: stage {best['stage']}, test: {_metrics(best['test'])}")
    out.print(f"alive: {total['alive']:,} of {total['prunable']:,} prunable weights")
    out.print(f"file: {result['file_bytes']:,} bytes, {folder / 'model.safetensors'}", soft_wrap=True)


def show_run(path: Path) -> None:
    folder = RunFolder(path)
    origin = folder.read_recipe()
    recipe = origin["recipe"]
    out.print(f"{origin.get('source', 'a run from Python')}: {recipe['method']} at sparsity {recipe['sparsity']}")
    if folder.result.exists():
        result = folder.read_result()
        table = _table("stage", "branch", "edits", "epoch", "alive", "validation", "candidate")
        for row in _last_of_each_phase(result["history"]):
            shown = (_metrics(row.get(name, {})) for name in ("validation", "candidate"))
            branch = "" if row["branch"] is None else str(row["branch"])
            table.add_row(str(row["stage"]), branch, row["edits"], str(row["epoch"]), f"{row['alive']:,}", *shown)
        out.print(table)
        show_result(result, path)
    else:
        out.print(f"not finished; go on with {folder.how_to_resume()}", soft_wrap=True)


def _last_of_each_phase(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the epochs of a phase, the last that was validated, or the last."""
    chosen: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in history:
        key = row["stage"], row["branch"], row["edits"]
        if row.get("validation") or key not in chosen:
            chosen[key] = row
    return list(chosen.values())


def show_file(path: Path) -> None:
    content = file.manifest(path)
    out.print_json(json.dumps(content))


def _table(*columns: str) -> Table:
    """Numbers are shown whole, to the right; where there is no room, texts go on in the next line."""
    table = Table()
    for name in columns:
        if name in ("edits", "validation", "candidate"):
            table.add_column(name, min_width=12, overflow="fold")
        else:
            table.add_column(name, no_wrap=True, justify="right")
    return table


def _short(count: int) -> str:
    """A count in three digits, such as 3.12 G."""
    if count < 1000:
        return str(count)
    power = next((p for p in range(1, 6) if count < 999.5 * 1000**p), 6)
    return f"{count / 1000**power:#.3g}".rstrip(".") + f" {'_kMGTPE'[power]}"


def _metrics(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _spread(values: list[float], sign: str = "") -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.2f}{spread}"
