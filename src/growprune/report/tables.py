"""The two tables of results: means over seeds of comparable runs, and all runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from growprune.report.chart import Value
from growprune.report.frontier import average_live, given, peak_live
from growprune.report.groups import Cell, Group
from growprune.runs import Record
from growprune.runs.metric import decimals, in_full, scaled
from growprune.runs.record import say_small

MEANS_HEAD = (
    *("run", "seeds", "epochs", "quality", "minus dense", "sparsity reached", "training FLOPs", "inference FLOPs"),
    *("peak live", "average live", "explored", "peak memory", "time"),
)
RUNS_HEAD = (
    *("run", "status", "method", "sparsity", "seed", "epochs", "metric", "test", "test of best by validation"),
    *("live weights", "file bytes", "peak bytes", "seconds"),
)
UNKNOWN = "-"
NOT_CHOSEN = "tuning run, not chosen"


def means(group: Group) -> list[list[str]]:
    """One row of means over seeds for each finished cell of a group."""
    dense = None if group.reference is None else group.reference.quality
    finished = [cell for cell in group.cells if cell.quality is not None]
    return [list(_cells(cell, dense)) for cell in finished]


def _cells(cell: Cell, dense: float | None) -> Iterator[str]:
    yield from (cell.label, str(cell.num_scores), str(cell.epochs), spread(cell))
    gap = (cell.quality or 0.0) - (dense or 0.0)
    said = "nan" if math.isnan(gap) else f"{gap:+.{decimals(dense)}f}"
    yield "" if dense is None or cell.is_dense else said
    yield _reached(cell)
    yield _say(cell.mean(given("training_flops")), scaled)
    yield _say(cell.mean(lambda record: record.total("flops_sparse")), scaled)
    for share in (cell.mean(peak_live), cell.mean(average_live), cell.mean(_explored)):
        yield _say(share, lambda known: f"{known:.1%}")
    yield _say(cell.mean(given("peak_bytes")), lambda count: f"{scaled(count)}B")
    yield _say(cell.mean(given("seconds")), duration)


def _say(value: float | None, how: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else how(value)


def _reached(cell: Cell) -> str:
    """The reached sparsity, with the target if it was missed. For a small dense model, its size."""
    if cell.first.small:
        return say_small(cell.first.small)
    reached = cell.mean(lambda record: record.total("sparsity"))
    if reached is None:
        return UNKNOWN
    return f"{reached:.4g} (target {in_full(cell.sparsity)})" if cell.is_off else f"{reached:.4g}"


def _explored(record: Record) -> float | None:
    """The last known fraction of explored weights."""
    return next((row["explored"] for row in reversed(record.history) if row.get("explored") is not None), None)


def spread(cell: Cell) -> str:
    """The mean quality over seeds, and the standard deviation if there are several."""
    if cell.quality is None:
        return UNKNOWN
    shown = (f"{number:.{decimals(cell.quality)}f}" for number in (cell.quality, cell.deviation) if number is not None)
    return " ± ".join(shown)


def duration(seconds: float) -> str:
    """Format a duration.

    >>> duration(42), duration(600), duration(9000)
    ('42 s', '10 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def all_runs(records: Sequence[Record]) -> list[list[Value]]:
    """One row per run, finished or not."""
    rows: list[list[Value]] = []
    for record in records:
        best = record.figure("best") or {}
        why = record.why or (NOT_CHOSEN if record.is_passed_over else "")
        status = f"{record.status}: {why}" if why else record.status
        rows.append(
            [
                *(record.name, status, record.method, record.sparsity, record.seed, record.epochs, record.metric.name),
                *(record.test, (best.get("test") or {}).get(record.metric.name), record.total("alive")),
                *(record.figure(name) for name in ("file_bytes", "peak_bytes", "seconds")),
            ]
        )
    return rows
