"""The two tables of results: means over seeds of comparable runs, and all runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from growprune.report.charts import Value, inference_flops, training_flops
from growprune.report.groups import Group
from growprune.runs import Record
from growprune.runs.record import in_full, say_small
from growprune.runs.result import decimals, plus_minus, scaled
from growprune.runs.table import RunRow

MEANS_HEAD = (
    *("run", "quality", "minus dense", "sparsity reached", "peak live", "average live", "explored"),
    *("training FLOPs", "inference FLOPs", "peak memory", "time", "epochs", "seeds"),
)
RUNS_HEAD = (
    *("run", "status", "method", "sparsity", "seed", "epochs", "metric", "test", "test of best by validation"),
    *("live weights", "file bytes", "peak bytes", "seconds"),
)
UNKNOWN = "-"
NOT_CHOSEN = "tuning run, not chosen"


def means(group: Group) -> list[list[str]]:
    """One row of means over seeds for each finished row of a group."""
    return [list(_cells(row, group.reference)) for row in group.finished]


def _cells(row: RunRow, dense: RunRow | None) -> Iterator[str]:
    yield from (row.label, spread(row), gap(row, dense), _reached(row))
    for share in (row.mean("peak_alive"), row.mean("average_alive"), row.mean(_explored)):
        yield _say(share, lambda known: f"{known:.1%}")
    yield from (_say(row.mean(training_flops), scaled), _say(row.mean(inference_flops), scaled))
    yield _say(row.mean("peak_bytes"), lambda count: f"{scaled(count)}B")
    yield from (_say(row.mean("seconds"), duration), f"{row.epochs:g}", str(row.spread("test").count))


def _say(value: float | None, how: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else how(value)


def gap(row: RunRow, dense: RunRow | None) -> str:
    """The mean difference to the dense row over common seeds, and its standard error. Empty if there is none."""
    found = None if dense is None or row.is_dense else row.minus(dense)
    if found is None:
        return ""
    return plus_minus(found.mean, found.standard_error, decimals(row.mean("test")), "+")


def _reached(row: RunRow) -> str:
    """The reached sparsity, with the target if it was missed. For a small dense model, its size."""
    if row.small:
        return say_small(row.small)
    if row.reached is None:
        return UNKNOWN
    return f"{row.reached:.4g} (target {in_full(row.sparsity)})" if row.is_off else f"{row.reached:.4g}"


def _explored(record: Record) -> float | None:
    """The last known fraction of explored weights."""
    return next((row["explored"] for row in reversed(record.history) if row.get("explored") is not None), None)


def spread(row: RunRow) -> str:
    """The mean quality over seeds, and the standard deviation if there are several."""
    found = row.spread("test")
    return plus_minus(found.mean, found.deviation, decimals(found.mean))


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
