"""Charts of quality against sparsity, FLOPs, live weights and memory, and of training time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from growprune.report.chart import INK, Chart, Styles, axis, layout
from growprune.report.groups import Cell, Group
from growprune.runs.record import Record
from growprune.runs.result import Json


@dataclass(frozen=True)
class Cost:
    """The x axis of a chart of quality."""

    name: str
    title: str
    axis: str
    caption: str
    """{up} and {above} are replaced by the direction of better scores."""
    of: Callable[[Record], float | None]
    tickformat: str


def given(name: str) -> Callable[[Record], Any]:
    """A function that returns an entry of a result, or None."""
    return lambda record: record.figure(name)


def _share_alive(record: Record, name: str, otherwise: Callable[[list[float]], float]) -> float | None:
    """Live weights as a fraction of the prunable ones. Results without this number use their history."""
    prunable = record.num_prunable
    if not prunable:
        return None
    if (counted := record.figure(name)) is not None:
        return float(counted / prunable)
    alive = [float(row["alive"]) for row in record.history]
    return otherwise(alive) / prunable if alive else None


def peak_live(record: Record) -> float | None:
    return _share_alive(record, "peak_alive", max)


def average_live(record: Record) -> float | None:
    return _share_alive(record, "average_alive", lambda alive: sum(alive) / len(alive))


COSTS = (
    Cost(
        "sparsity",
        "Quality against sparsity",
        "sparsity",
        "Quality as more weights are removed. The dashed line is the dense model; a point on or {above} it lost "
        "nothing. Runs of one sparsity are drawn side by side.",
        lambda record: record.sparsity,
        "~%",
    ),
    Cost(
        "training-flops",
        "Quality against training FLOPs",
        "training FLOPs",
        "The compute that each method needed for training. {up} and left is better.",
        given("training_flops"),
        "~s",
    ),
    Cost(
        "inference-flops",
        "Quality against inference FLOPs",
        "theoretical FLOPs per example",
        "The compute that the trained model needs per example if zeros are skipped. {up} and left is better.",
        lambda record: record.total("flops_sparse"),
        "~s",
    ),
    Cost(
        "peak-live",
        "Quality against peak live weights",
        "peak live weights (fraction)",
        "The largest size of the model during training. A method at 100 % needs memory for the dense model.",
        peak_live,
        ".0%",
    ),
    Cost(
        "average-live",
        "Quality against average live weights",
        "average live weights (fraction)",
        "The average size of the model during training, which is about what training could cost.",
        average_live,
        ".0%",
    ),
    Cost(
        "peak-memory",
        "Quality against peak memory",
        "measured peak bytes",
        "Measured peak memory: of the GPU, or of the whole process on a CPU. Compare only runs on one machine with the "
        "same storage.",
        given("peak_bytes"),
        "~s",
    ),
)


def frontier_charts(group: Group, styles: Styles) -> list[Chart]:
    """One chart for each cost that the runs have numbers for."""
    return [chart for cost in COSTS if (chart := _chart(cost, group, styles))]


def _chart(cost: Cost, group: Group, styles: Styles) -> Chart | None:
    series: dict[str, list[Cell]] = {}
    for cell in group.sparse:
        if cell.mean(cost.of) is not None and cell.quality is not None:
            series.setdefault(cell.series, []).append(cell)
    if not series:
        return None
    shown = [cell for cells in series.values() for cell in cells]
    dense = [cell for cell in group.dense if cell.quality is not None]
    xs = [cell.mean(cost.of) or 0.0 for cell in shown]
    data = [trace for cell in dense for trace in _dense(cell, cost, xs)]
    data += [_trace(cells, cost, styles) for cells in series.values()]
    up, above = ("Down", "below") if group.metric.lower_is_better else ("Up", "above")
    caption = cost.caption.format(up=up, above=above)
    if cost.name == "sparsity":
        _put_side_by_side([trace for trace in data if "customdata" in trace], xs)
    return Chart(
        f"quality-{cost.name}",
        cost.title,
        caption + (" Bars are one standard deviation over seeds." if _has_spread(shown) else ""),
        data,
        layout(_x_axis(cost, xs), axis(f"{group.metric.name}, test data")),
        ["run", "sparsity", cost.axis, f"{group.metric.name} (mean)", "standard deviation", "seeds"],
        [[c.label, c.sparsity, c.mean(cost.of), c.quality, c.deviation, c.num_scores] for c in [*dense, *shown]],
    )


def _x_axis(cost: Cost, xs: list[float]) -> Json:
    """The x axis. Sparsities are few and round, so they are the ticks."""
    if cost.name != "sparsity":
        return axis(cost.axis, tickformat=cost.tickformat)
    ends = [min(xs) - 0.5 * _gap(xs), max(xs) + 0.5 * _gap(xs)]
    return axis(cost.axis, tickvals=sorted(set(xs)), tickformat=cost.tickformat, range=ends)


def _put_side_by_side(traces: list[Json], xs: list[float]) -> None:
    """Shift methods of the same sparsity a little, so that all are visible."""
    for number, trace in enumerate(traces):
        trace["x"] = [x + 0.7 * _gap(xs) * ((number + 0.5) / len(traces) - 0.5) for x in trace["x"]]


def _gap(xs: list[float]) -> float:
    """The smallest difference between two sparsities."""
    return min((b - a for a, b in pairwise(sorted(set(xs)))), default=0.04)


def _trace(cells: list[Cell], cost: Cost, styles: Styles) -> Json:
    cells = sorted(cells, key=lambda cell: cell.mean(cost.of) or 0.0)
    style = styles.of(cells[0])
    trace: Json = {"type": "scatter", "name": cells[0].series, "mode": "lines+markers"}
    trace |= {"x": [cell.mean(cost.of) for cell in cells], "y": [cell.quality for cell in cells]}
    trace |= {"line": style.line(width=1.5, dash="solid"), "marker": style.marker(size=11)}
    if _has_spread(cells):
        trace["error_y"] = {"type": "data", "array": [cell.deviation or 0.0 for cell in cells], "width": 4}
    trace["customdata"] = [f"{cell.label}, {cell.num_scores} seeds" for cell in cells]
    at = "" if cost.name == "sparsity" else f" at %{{x:{cost.tickformat}}}"
    trace["hovertemplate"] = f"%{{customdata}}<br>%{{y:.4g}}{at}<extra></extra>"
    return trace


def _dense(cell: Cell, cost: Cost, xs: list[float]) -> list[Json]:
    """The dense model as a line, and as a point if it has a cost on the axis."""
    x, y = cell.mean(cost.of), cell.quality
    name = f"{cell.label}, {cell.epochs} epochs" if not cell.variant else cell.label
    ends = [min(xs), max(xs)] if x is None or cost.name == "sparsity" else [min(*xs, x), max(*xs, x)]
    if cost.name == "sparsity" or ends[0] == ends[1]:
        ends = [ends[0] * 0.98, ends[1] * 1.02]
    line: Json = {"type": "scatter", "mode": "lines", "name": name, "x": ends, "y": [y, y], "legendgroup": name}
    line |= {
        "line": {"color": INK, "dash": "dash", "width": 1.5},
        "hovertemplate": f"{name}<br>%{{y:.4g}}<extra></extra>",
    }
    if x is None or cost.name == "sparsity":
        return [line]
    point: Json = {"type": "scatter", "mode": "markers", "name": name, "x": [x], "y": [y], "legendgroup": name}
    point |= {"marker": {"color": INK, "symbol": "asterisk", "size": 11, "line": {"color": INK, "width": 1.5}}}
    point |= {"showlegend": False, "hovertemplate": f"{name}<br>%{{y:.4g}} at %{{x:{cost.tickformat}}}<extra></extra>"}
    return [line, point]


def _has_spread(cells: list[Cell]) -> bool:
    return any(cell.deviation is not None for cell in cells)


def time_chart(group: Group, styles: Styles) -> Chart | None:
    """The measured training time."""
    of = given("seconds")
    cells = [cell for cell in group.cells if cell.mean(of) is not None]
    if not cells:
        return None
    cells = sorted(cells, key=lambda cell: -(cell.mean(of) or 0.0))
    seconds = [cell.mean(of) or 0.0 for cell in cells]
    unit, size = ("hours", 3600) if max(seconds) > 7200 else ("minutes", 60) if max(seconds) > 120 else ("seconds", 1)
    bar: Json = {"type": "bar", "orientation": "h", "x": [each / size for each in seconds]}
    bar |= {"y": [cell.label for cell in cells], "text": [f"{each / size:.3g}" for each in seconds]}
    bar["marker"] = {"color": [styles.of(cell).colour for cell in cells]}
    bar["hovertemplate"] = f"%{{y}}: %{{x:.4g}} {unit}<extra></extra>"
    bar |= {"textposition": "inside", "insidetextanchor": "start", "textangle": 0}
    if any(cell.spread(of) for cell in cells):
        spreads = [None if (each := cell.spread(of)) is None else each / size for cell in cells]
        bar["error_x"] = {"type": "data", "array": spreads, "width": 4, "color": INK}
    return Chart(
        "time",
        "Training time",
        f"The {unit} that a run took. Compare only runs that had the same kind of machine to themselves.",
        [bar],
        layout(axis(unit, rangemode="tozero"), axis("", type="category", ticksuffix=" "), showlegend=False),
        ["run", "seconds (mean)", "standard deviation", "seeds"],
        [[c.label, c.mean(of), c.spread(of), len(c.records)] for c in cells],
        height=110 + 34 * len(cells),
    )
