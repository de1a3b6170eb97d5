"""What came of runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from growprune.cli.console.screen import metrics_text, new_table, out, spread
from growprune.engine import RunFolder
from growprune.logs.rows import StandingRows, read_events


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
            spread(accuracy),
            f"{total['alive']:,}",
            f"{total['flops_sparse'] / 1e6:.2f} M",
            f"{results[0]['file_bytes']:,}",
            f"{statistics.mean(result['seconds'] for result in results):.1f}",
        )
    out.print(table)
    dense, sparse = ([r["test"]["accuracy"] for r in results] for results in rows.values())
    gaps = [s - d for s, d in zip(sparse, dense, strict=True)]
    out.print(f"sparse minus dense, same epochs: {spread(gaps, sign='+')} points. Runs are in {folder}.")


def show_result(result: dict[str, Any], folder: Path) -> None:
    total = result["sparsity"]["totals"]
    out.print(f"test: {metrics_text(result['test'])}")
    if result["best"]:
        best = result["best"]
        out.print(f"best by validation: stage {best['stage']}, test: {metrics_text(best['test'])}")
    out.print(f"alive: {total['alive']:,} of {total['prunable']:,} prunable weights")
    out.print(f"file: {result['file_bytes']:,} bytes, {folder / 'model.safetensors'}", soft_wrap=True)


def run_content(path: Path) -> dict[str, Any]:
    """A run, for machines: its recipe, where that came from, and its result, null if it is not finished."""
    folder = RunFolder(path)
    stored = folder.read_recipe()
    is_finished = folder.result.exists()
    return {
        "kind": "run",
        "path": str(path),
        "is_finished": is_finished,
        "recipe": stored["recipe"],
        "origin": folder.read_origin(),
        "result": folder.read_result() if is_finished else None,
    }


def show_run(path: Path) -> None:
    folder = RunFolder(path)
    origin = folder.read_recipe()
    recipe = origin["recipe"]
    out.print(f"{origin.get('source', 'a run from Python')}: {recipe['method']} at sparsity {recipe['sparsity']}")
    if folder.result.exists():
        result = folder.read_result()
        out.print(_history(result))
        show_result(result, path)
    else:
        _show_so_far(path)
        out.print(f"not finished; go on with {folder.how_to_resume()}", soft_wrap=True)


def _show_so_far(path: Path) -> None:
    """How far a run has come that is not finished, and why it ended if it did."""
    events = read_events(path)
    last = [*StandingRows(events)][-1:]
    for row in last:
        figures = {name: row.figures.get(name) for name in ("epoch", "loss", "density")}
        figures |= {name: value for name, value in row.figures.items() if name.startswith("validation/")}
        known = (f"{name.replace('/', ' ')} {value:.4g}" for name, value in figures.items() if value is not None)
        out.print(f"so far: {', '.join(known)}", highlight=False)
    if events and events[-1]["event"] == "failed":
        out.print(f"failed: {events[-1].get('message')}", soft_wrap=True, highlight=False)


def _history(result: Mapping[str, Any]) -> Table:
    """How the phases of a run ended; of several metrics, the one that counts."""
    rows = _last_of_each_phase(result["history"])
    has_branches = any(row["branch"] is not None for row in rows)
    shown = new_table("stage", *(["branch"] if has_branches else []), "edits", "epoch", "alive", *SPLITS)
    for row in rows:
        branch = ["" if row["branch"] is None else str(row["branch"])] if has_branches else []
        scores = [_score(row.get(split) or {}, result.get("metric")) for split in SPLITS]
        shown.add_row(str(row["stage"]), *branch, row["edits"], str(row["epoch"]), f"{row['alive']:,}", *scores)
    metric = result.get("metric") or next((name for row in rows for name in row.get("validation") or ()), "")
    shown.caption = f"{metric} on validation data; candidate: if it were pruned to the end right then"
    return shown


SPLITS = ("validation", "candidate")


def _score(metrics: Mapping[str, float], metric: str | None) -> str:
    values = [metrics[metric]] if metric and metric in metrics else [*metrics.values()][:1]
    return "".join(f"{value:.4g}" for value in values)


def _last_of_each_phase(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the epochs of a phase, the last that was validated, or the last."""
    chosen: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in history:
        key = row["stage"], row["branch"], row["edits"]
        if row.get("validation") or key not in chosen:
            chosen[key] = row
    return list(chosen.values())
