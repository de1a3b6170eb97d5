"""Charts over epochs: quality, loss, live weights, explored weights and mask churn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from growprune.report.chart import Chart, Styles, axis, layout
from growprune.report.groups import Cell, Group
from growprune.runs.record import Record
from growprune.runs.result import Json

Points = dict[int, float]
"""Values by epoch."""


@dataclass(frozen=True)
class Quantity:
    """The quantity of one chart over time. Rows of the branches of a fork share an epoch."""

    name: str
    title: str
    axis: str
    caption: str
    of: Callable[[Record, Json], float | None]
    join: Callable[[Iterable[float]], float]
    """Combines the values of the branches of a fork."""
    is_step: bool = False
    is_share: bool = False


OF_ANY_TASK = (
    Quantity(
        "loss",
        "Loss over time",
        "training loss",
        "The training loss falls as the model learns, and jumps where weights are pruned.",
        lambda record, row: row.get("loss"),
        statistics.mean,
    ),
    Quantity(
        "live",
        "Live weights over time",
        "live weights (fraction of prunable)",
        "The size of the model over time. Training needs memory for the peak of a line.",
        lambda record, row: row["alive"] / size if (size := record.num_prunable) else None,
        max,
        is_step=True,
        is_share=True,
    ),
    Quantity(
        "explored",
        "Weights ever explored",
        "ever trained (fraction of prunable)",
        "The fraction of weights that have been trained so far. A method that reaches 100 % has tried every weight; a "
        "flat line means that no new weights were tried.",
        lambda record, row: row.get("explored"),
        max,
        is_step=True,
        is_share=True,
    ),
    Quantity(
        "churn",
        "Mask churn",
        "changed by the last edit (fraction of live)",
        "How much of the mask the last edit changed. At 0 % all live weights stayed; at 100 % none did.",
        lambda record, row: row.get("churn"),
        max,
        is_step=True,
        is_share=True,
    ),
)


def quantities(group: Group) -> list[Quantity]:
    """The charts over time, in the order of the page."""
    metric, better = group.metric.name, "lower" if group.metric.lower_is_better else "higher"
    after = "Lines jump where weights are pruned" if group.metric.lower_is_better else "Dips follow edits"
    quality = Quantity(
        "quality",
        f"Validation {metric} over time",
        f"{metric} on validation data",
        f"The {metric} on data that the model was not trained on: {better} is better. {after}.",
        lambda record, row: (row.get("validation") or {}).get(record.metric.name),
        statistics.mean,
    )
    return [quality, *OF_ANY_TASK]


def charts_over_time(group: Group, styles: Styles) -> list[Chart]:
    """The charts over time for which any run has numbers."""
    return [chart for quantity in quantities(group) if (chart := _chart(quantity, group, styles))]


def _chart(quantity: Quantity, group: Group, styles: Styles) -> Chart | None:
    found = {cell.label: (cell, points) for cell in group.cells if (points := points_of(cell, quantity))}
    if not found:
        return None
    has_seeds = any(len(cell.records) > 1 for cell in group.cells)
    y = axis(quantity.axis, **({"rangemode": "tozero", "tickformat": ".0%"} if quantity.is_share else {}))
    epochs = sorted({epoch for _, points in found.values() for epoch in points})
    return Chart(
        quantity.name,
        quantity.title,
        quantity.caption + (" Lines are means over seeds." if has_seeds else ""),
        [_trace(quantity, cell, points, styles) for cell, points in found.values()],
        layout(axis("epoch", rangemode="tozero"), y),
        ["epoch", *found],
        [[epoch, *(points.get(epoch) for _, points in found.values())] for epoch in epochs],
    )


def _trace(quantity: Quantity, cell: Cell, points: Points, styles: Styles) -> Json:
    style = styles.of(cell)
    xs, ys = list(points), list(points.values())
    if quantity.is_step and xs[0] == 1:  # the first epoch has the same value at its start
        xs, ys = [0, *xs], [ys[0], *ys]
    trace: Json = {"type": "scatter", "x": xs, "y": ys, "name": cell.label}
    trace |= {"mode": "lines+markers", "line": style.line(shape="vh" if quantity.is_step else "linear")}
    # some markers, so that lines differ without colours
    trace["marker"] = style.marker(size=7, maxdisplayed=0 if len(points) <= 12 else 9)
    number = ".1%" if quantity.is_share else ".4g"
    trace["hovertemplate"] = f"{cell.label}<br>epoch %{{x}}: %{{y:{number}}}<extra></extra>"
    return trace


def points_of(cell: Cell, quantity: Quantity) -> Points:
    """The mean over seeds at the epochs that all of them have."""
    of_seeds = [points for record in cell.records if (points := _points(record, quantity))]
    if not of_seeds:
        return {}
    shared = set.intersection(*(set(points) for points in of_seeds))
    return {epoch: statistics.mean(points[epoch] for points in of_seeds) for epoch in sorted(shared)}


def _points(record: Record, quantity: Quantity) -> Points:
    by_epoch: dict[int, list[float]] = {}
    for row in record.history:
        value = quantity.of(record, row)
        if value is not None:
            by_epoch.setdefault(row["epoch"], []).append(float(value))
    return {epoch: float(quantity.join(values)) for epoch, values in by_epoch.items()}
