"""Text about tuned rows for tables and pages: the choice, the grid and the number of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from growprune.runs.comparable import say_grid
from growprune.runs.metric import decimals, in_full
from growprune.runs.record import Record
from growprune.runs.result import Json

HEAD = ("row", "chosen", "validation", "grid", "tuning runs", "failed")
FAILED = "failed"
"""Status of a point that cannot be chosen."""


def tunings_of(runs: Sequence[Record]) -> list[Json]:
    """The tuning of each row of some runs."""
    found: dict[Path, Json] = {}
    for run in runs:
        if run.tuning:
            found.setdefault(run.folder.parent.parent, run.tuning)
    return [*found.values()]


def cells_of(tuning: Json) -> list[str]:
    """The cells of a tuned row, in the order of HEAD."""
    points = tuning["points"]
    score = next((point["validation"] for point in points if point["name"] == tuning["chosen"]), None)
    shown = "-" if score is None else f"{score:.{decimals(score)}f}"
    failed = sum(point["status"] == FAILED for point in points)
    numbers = (tuning["size"], len(points), failed)
    return [name_of(tuning), tuning["chosen"] or _why_not(tuning), shown, *map(str, numbers)]


def name_of(tuning: Json) -> str:
    """The name of the row, and its sparsity if it has one."""
    sparsity = in_full(tuning["sparsity"])
    return tuning["row"] if sparsity == "0" else f"{tuning['row']} {sparsity}"


def _why_not(tuning: Json) -> str:
    points = tuning["points"]
    left = sum(point["status"] not in ("finished", FAILED) for point in points)
    return f"not yet: {left} of {len(points)} runs left" if left else f"none: all {len(points)} runs failed"


def errors_of(tuning: Json) -> list[str]:
    """One line for each failed point, and one for a row in which all points failed."""
    name, failed = name_of(tuning), [point for point in tuning["points"] if point["status"] == FAILED]
    said = [f"{name} {point['name']} seed {tuning['seed']} failed in tuning: {point['error']}" for point in failed]
    is_lost = len(failed) == len(tuning["points"])
    return [*said, *([f"{name} has no result: no point of its grid finished"] if is_lost else [])]


def notes_of(tunings: Sequence[Json]) -> list[str]:
    """Notes on the tuned settings, how they were chosen, and the number of runs."""
    by_grid: dict[str, list[Json]] = {}
    for each in tunings:
        by_grid.setdefault(say_grid(each["grid"]), []).append(each)
    notes = [_say_grid(grid, alike) for grid, alike in by_grid.items()]
    for each in [each for each in tunings if len(each["points"]) < each["size"]]:
        notes.append(f"{name_of(each)}: the {each['size']} points give {len(each['points'])} different runs")
    return [*notes, *_say_edges(tunings)]


def _say_edges(tunings: Sequence[Json]) -> list[str]:
    """Name the settings whose best value is the smallest or the largest of the grid: the best may lie beyond it."""
    edges: dict[tuple[str, str], list[str]] = {}
    for each in tunings:
        tried = [point.get("settings", {}) for point in each["points"]]
        chosen: Json = next((p.get("settings", {}) for p in each["points"] if p["name"] == each["chosen"]), {})
        for key, text in chosen.items():
            values = {value for settings in tried if (value := _number(settings.get(key))) is not None}
            if len(values) > 1 and (value := _number(text)) in (min(values), max(values)):
                edge = "smallest" if value == min(values) else "largest"
                edges.setdefault((key, edge), []).append(f"{name_of(each)} ({text})")
    return [
        f"the best {key} is the {edge} of the grid for {', '.join(rows)}: a wider grid may give better results"
        for (key, edge), rows in edges.items()
    ]


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _say_grid(grid: str, alike: Sequence[Json]) -> str:
    first, runs = alike[0], sum(len(each["points"]) for each in alike)
    chosen = sum(each["chosen"] is not None for each in alike)
    return (
        f"every row was tuned over the same grid of {first['size']} points ({grid}), chosen by validation "
        f"{first['metric']} with seed {first['seed']}: {runs} runs for {len(alike)} rows. The {chosen} chosen runs are "
        f"the results of that seed"
    )
