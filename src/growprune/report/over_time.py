"""Charts over epochs: quality, loss, live weights, explored weights and mask churn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from growprune.files import json_file
from growprune.report.chart import Chart, Styles, axis, layout, of_row
from growprune.report.groups import Group
from growprune.runs import Record
from growprune.runs.result import Json
from growprune.runs.table import RunRow

Key = tuple[float, bool, int]
"""An epoch, whether a phase starts there (otherwise an epoch ends), and the stage of the plan."""


@dataclass(frozen=True)
class Quantity:
    """The quantity of one chart over time."""

    name: str
    """A field of the history; live weights and quality are made from such fields."""
    title: str
    axis: str
    caption: str
    join: Callable[[Iterable[float]], float] = max
    """Combines the values of the branches of a fork, which share their epochs."""

    @property
    def is_share(self) -> bool:
        """True for a fraction that changes in steps."""
        return self.name in ("live", "explored", "churn")

    def of(self, record: Record, entry: Json) -> Any:
        """The value in an entry of the history, or in the event of a phase. None if there is none."""
        if self.name == "live":
            return entry["alive"] / record.num_prunable if record.num_prunable else None
        if self.name == "quality":
            return (entry.get("validation") or {}).get(record.metric.name)
        return entry.get(self.name)


def quantities(group: Group) -> list[Quantity]:
    """The charts over time, in the order of the page."""
    metric, better = group.metric.name, "lower" if group.metric.lower_is_better else "higher"
    quality = f"The {metric} on data that the model was not trained on: {better} is better."
    loss = "The training loss falls as the model learns, and jumps where weights are pruned."
    live = "The size of the model. Training needs memory for the peak. Without a log, only ends of epochs are known."
    explored = "The fraction of weights that were trained so far. A flat line means that no new weights were tried."
    churn = "How much of the mask the last edit changed. At 0 % all live weights stayed; at 100 % none did."
    over, on_data, share = f"Validation {metric} over time", f"{metric} on validation data", "(fraction of prunable)"
    return [
        Quantity("quality", over, on_data, quality, statistics.mean),
        Quantity("loss", "Loss over time", "training loss", loss, statistics.mean),
        Quantity("live", "Live weights over time", f"live weights {share}", live),
        Quantity("explored", "Weights ever explored", f"ever trained {share}", explored),
        Quantity("churn", "Mask churn", "changed by the last edit (fraction of live)", churn),
    ]


def charts_over_time(group: Group, styles: Styles) -> list[Chart]:
    """The charts over time for which any run has numbers."""
    return [chart for quantity in quantities(group) if (chart := _chart(quantity, group, styles))]


def _chart(quantity: Quantity, group: Group, styles: Styles) -> Chart | None:
    found = [(row, seeds) for row in group.rows if (seeds := _seeds(row, quantity))]
    if not found:
        return None
    means = [{key: statistics.mean(values) for key, values in seeds.items()} for _, seeds in found]
    y = axis(quantity.axis, **({"rangemode": "tozero", "tickformat": ".0%"} if quantity.is_share else {}))
    bands = " Lines are means over seeds; bands reach from the lowest seed to the highest."
    keys = sorted({key for points in means for key in points})
    return Chart(
        quantity.name,
        quantity.title,
        quantity.caption + (bands if any(len(row.runs) > 1 for row, _ in found) else ""),
        [trace for row, seeds in found for trace in _traces(quantity, row, seeds, styles)],
        layout(axis("epoch", rangemode="tozero"), y),
        ["epoch", *(row.label for row, _ in found)],
        [[_epoch(key), *(points.get(key) for points in means)] for key in keys],
    )


def _epoch(key: Key) -> float:
    return int(key[0]) if key[0] == int(key[0]) else round(key[0], 4)


def _seeds(row: RunRow, quantity: Quantity) -> dict[Key, list[float]]:
    """The values of all seeds, where all of them have one."""
    of_seeds = [points for record in row.runs if (points := _points(record, quantity))]
    shared = set.intersection(*map(set, of_seeds)) if of_seeds else set()
    return {key: [points[key] for points in of_seeds] for key in sorted(shared)}


def _points(record: Record, quantity: Quantity) -> dict[Key, float]:
    """The values at the ends of epochs. Live weights also where phases start, which is where their peaks are."""
    found: dict[Key, list[float]] = {}
    ends = [((float(entry["epoch"]), False, 0), entry) for entry in record.history]
    for key, entry in [*ends, *(_phases(record) if quantity.name == "live" else ())]:
        if (value := quantity.of(record, entry)) is not None:
            found.setdefault(key, []).append(float(value))
    return {key: float(quantity.join(values)) for key, values in found.items()}


def _phases(record: Record) -> Iterator[tuple[Key, Json]]:
    """The start of each phase. A phase that a kill undid counts once."""
    ends = [(entry["iteration"], entry["epoch"]) for entry in record.history if entry.get("iteration")]
    per_epoch = max((iteration / epoch for iteration, epoch in ends if epoch), default=0)
    wanted: json_file.Names = {"index": int, "stage": int, "iteration": int, "alive": int}
    events = [event for event in record.events if event["event"] == "phase" and not json_file.fault(event, wanted)]
    for event in {event["index"]: event for event in events}.values() if per_epoch else ():
        yield (event["iteration"] / per_epoch, True, event["stage"]), event


def _traces(quantity: Quantity, row: RunRow, seeds: dict[Key, list[float]], styles: Styles) -> list[Json]:
    """A line, and a band below it if there are several seeds that differ."""
    style, points, shape = styles.of(row), [(key[0], values) for key, values in seeds.items()], "linear"
    if quantity.is_share:  # nothing changes between phases; an epoch without phases is as it was at its end
        shape = "hv" if any(is_start for _, is_start, _ in seeds) else "vh"
        points = [(0.0, points[0][1]), *points] if points[0][0] == 1 else points
    same = {**of_row(row), "x": [epoch for epoch, _ in points]}
    line: Json = {**same, "y": [statistics.mean(values) for _, values in points], "line": style.line(shape=shape)}
    # some markers, so that lines differ without colours
    line |= {"mode": "lines" if row.is_dense else "lines+markers"}
    line["marker"] = style.marker(size=7, maxdisplayed=0 if len(points) <= 12 else 9)
    number = ".1%" if quantity.is_share else ".4g"
    line["hovertemplate"] = f"{row.label}<br>epoch %{{x:.4~g}}: %{{y:{number}}}<extra></extra>"
    low, high = [min(values) for _, values in points], [max(values) for _, values in points]
    if low == high or not all(map(math.isfinite, [*low, *high])):
        return [line]
    edge = {**same, "mode": "lines", "line": {"width": 0, "shape": shape}, "showlegend": False, "hoverinfo": "skip"}
    return [{**edge, "y": low}, {**edge, "y": high, "fill": "tonexty", "fillcolor": style.faint}, line]
