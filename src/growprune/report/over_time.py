"""Charts over epochs: quality, loss, live weights, explored weights and mask churn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from growprune.files import json_file
from growprune.report.chart import Chart, Styles, axis, layout, of_row
from growprune.report.groups import Group
from growprune.runs import Record
from growprune.runs.result import Json
from growprune.runs.table import RunRow

Key = tuple[float, bool, int]
"""An epoch, whether a phase starts there (otherwise an epoch ends), and the stage of the plan."""
Points = dict[Key, float]


@dataclass(frozen=True)
class Quantity:
    """The quantity of one chart over time. Branches of a fork share their epochs."""

    name: str
    title: str
    axis: str
    caption: str
    of: Callable[[Record, Json], float | None]
    """Its value in an entry of the history, or in the event of a phase."""
    join: Callable[[Iterable[float]], float]
    """Combines the values of the branches of a fork."""
    is_share: bool = False
    """True for a fraction that changes in steps."""


LIVE = Quantity(
    "live",
    "Live weights over time",
    "live weights (fraction of prunable)",
    "The size of the model over time. Training needs memory for the peak of a line. Without the log of a run, only the "
    "size at the end of each epoch is known.",
    lambda record, entry: entry["alive"] / size if (size := record.num_prunable) else None,
    max,
    is_share=True,
)
OF_ANY_TASK = (
    Quantity(
        "loss",
        "Loss over time",
        "training loss",
        "The training loss falls as the model learns, and jumps where weights are pruned.",
        lambda record, entry: entry.get("loss"),
        statistics.mean,
    ),
    LIVE,
    Quantity(
        "explored",
        "Weights ever explored",
        "ever trained (fraction of prunable)",
        "The fraction of weights that have been trained so far. A method that reaches 100 % has tried every weight; a "
        "flat line means that no new weights were tried.",
        lambda record, entry: entry.get("explored"),
        max,
        is_share=True,
    ),
    Quantity(
        "churn",
        "Mask churn",
        "changed by the last edit (fraction of live)",
        "How much of the mask the last edit changed. At 0 % all live weights stayed; at 100 % none did.",
        lambda record, entry: entry.get("churn"),
        max,
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
        lambda record, entry: (entry.get("validation") or {}).get(record.metric.name),
        statistics.mean,
    )
    return [quality, *OF_ANY_TASK]


def charts_over_time(group: Group, styles: Styles) -> list[Chart]:
    """The charts over time for which any run has numbers."""
    return [chart for quantity in quantities(group) if (chart := _chart(quantity, group, styles))]


def _chart(quantity: Quantity, group: Group, styles: Styles) -> Chart | None:
    found = [(row, seeds) for row in group.rows if (seeds := curves(row, quantity))]
    if not found:
        return None
    means = [{key: statistics.mean(values) for key, values in seeds.items()} for _, seeds in found]
    y = axis(quantity.axis, **({"rangemode": "tozero", "tickformat": ".0%"} if quantity.is_share else {}))
    has_seeds = any(len(row.runs) > 1 for row, _ in found)
    keys = sorted({key for points in means for key in points})
    return Chart(
        quantity.name,
        quantity.title,
        quantity.caption
        + (" Lines are means over seeds; bands reach from the lowest seed to the highest." * has_seeds),
        [trace for row, seeds in found for trace in _traces(quantity, row, seeds, styles)],
        layout(axis("epoch", rangemode="tozero"), y),
        ["epoch", *(row.label for row, _ in found)],
        [[_epoch(key), *(points.get(key) for points in means)] for key in keys],
    )


def _epoch(key: Key) -> float:
    return int(key[0]) if key[0] == int(key[0]) else round(key[0], 4)


def curves(row: RunRow, quantity: Quantity) -> dict[Key, list[float]]:
    """The values of all seeds, where all of them have one."""
    of_seeds = [points for record in row.runs if (points := _points(record, quantity))]
    shared = set.intersection(*map(set, of_seeds)) if of_seeds else set()
    return {key: [points[key] for points in of_seeds] for key in sorted(shared)}


def _points(record: Record, quantity: Quantity) -> Points:
    """The values at the ends of epochs. Live weights also where phases start, which is where their peaks are."""
    found: dict[Key, list[float]] = {}
    ends = [((float(entry["epoch"]), False, 0), entry) for entry in record.history]
    for key, entry in [*ends, *(_phases(record) if quantity is LIVE else ())]:
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
    style = styles.of(row)
    points = [(epoch, values) for (epoch, *_), values in seeds.items()]
    shape = "linear"
    if quantity.is_share:  # between phases nothing changes; an epoch without phases is as it was at its end
        shape = "hv" if any(is_start for _, is_start, _ in seeds) else "vh"
        points = [(0.0, points[0][1]), *points] if points[0][0] == 1 else points
    xs = [epoch for epoch, _ in points]
    same = {**of_row(row), "x": xs}
    number = ".1%" if quantity.is_share else ".4g"
    line: Json = {**same, "y": [statistics.mean(values) for _, values in points], "mode": "lines+markers"}
    line |= {"line": style.line(shape=shape), "hovertemplate": f"{row.label}<br>epoch %{{x:.4~g}}: %{{y:{number}}}"}
    line["hovertemplate"] += "<extra></extra>"
    # some markers, so that lines differ without colours
    line["marker"] = style.marker(size=7, maxdisplayed=0 if len(xs) <= 12 else 9)
    if row.is_dense:
        line |= {"mode": "lines"}
    low, high = [min(values) for _, values in points], [max(values) for _, values in points]
    if low == high or not all(map(math.isfinite, [*low, *high])):
        return [line]
    edge = {**same, "mode": "lines", "line": {"width": 0, "shape": shape}, "showlegend": False, "hoverinfo": "skip"}
    return [{**edge, "y": low}, {**edge, "y": high, "fill": "tonexty", "fillcolor": style.faint}, line]
