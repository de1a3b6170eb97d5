"""Charts as values: the Plotly data, a table, and a caption that says what to see.

Quality against sparsity, FLOPs, live weights and memory; training over time; the sparsity of each layer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from growprune.files import disk
from growprune.report.groups import Group
from growprune.runs import Record
from growprune.runs.record import in_full
from growprune.runs.result import Json
from growprune.runs.table import RunRow

Value = str | float | int | None

COLOURS = (
    *("#1a7fc4", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#4aa3df", "#8c6bb1", "#7f7f00"),
    *("#e0559b", "#3f8f8f", "#a0522d", "#6b7fd7"),
)
"""Distinct in most forms of colour blindness, and visible on white and black. The first eight follow Okabe and Ito."""
SHAPES = {
    "circle": "M-5,0A5,5 0 1 1 5,0A5,5 0 1 1 -5,0Z",
    "square": "M-5,-5H5V5H-5Z",
    "diamond": "M0,-6.5L6.5,0L0,6.5L-6.5,0Z",
    "triangle-up": "M0,-6L6,5H-6Z",
    "triangle-down": "M0,6L6,-5H-6Z",
    "cross": "M-2,-6H2V-2H6V2H2V6H-2V2H-6V-2H-2Z",
    "x": "M-6,-3L-3,-6L0,-3L3,-6L6,-3L3,0L6,3L3,6L0,3L-3,6L-6,3L-3,0Z",
    "pentagon": "M0,-6L6,-1.5L3.7,5H-3.7L-6,-1.5Z",
    "star": "M0,-7L1.7,-2.2L6.7,-2.2L2.7,0.9L4.1,5.7L0,2.8L-4.1,5.7L-2.7,0.9L-6.7,-2.2L-1.7,-2.2Z",
    "hexagon": "M0,-6L5.2,-3V3L0,6L-5.2,3V-3Z",
    "triangle-left": "M-6,0L5,6V-6Z",
    "triangle-right": "M6,0L-5,6V-6Z",
    "bowtie": "M-6,-5L6,5V-5L-6,5Z",
    "hourglass": "M-5,-6H5L-5,6H5Z",
}
"""Plotly's name of each symbol, and its path in the legend."""
SYMBOLS = (*SHAPES, *(f"{shape}-open" for shape in SHAPES))
"""More symbols than methods, so that methods differ even where colours repeat."""
DASHES = {"solid": "", "dot": "2 3", "dashdot": "6 3 2 3", "longdash": "9 4", "longdashdot": "9 3 2 3"}
"""Line styles of Plotly, and of SVG. The dense model has `dash`."""
INK, FAINT_INK = "ink", "ink-faint"
"""Placeholders that page.js replaces by the colour of the text, for lines that are not methods."""
LEGEND_WIDTH = 34


@dataclass(frozen=True)
class Chart:
    """A trace belongs to a row (`legendgroup`) and a sparsity (`meta`), by which the legend of the page hides it."""

    name: str
    """Name of downloaded files."""
    title: str
    caption: str
    data: list[Json]
    layout: Json
    columns: Sequence[str]
    """Columns of the table of the chart."""
    rows: Sequence[Sequence[Value]]


@dataclass(frozen=True)
class Style:
    """Look of a row, the same in every chart of a page. Rows never differ by colour alone."""

    colour: str
    symbol: str
    dash: str

    def line(self, **more: Any) -> Json:
        return {"color": self.colour, "dash": self.dash, "width": 2, **more}

    def marker(self, **more: Any) -> Json:
        return {"color": self.colour, "symbol": self.symbol, "size": 10, **more}

    @property
    def swatch(self) -> str:
        """A line with the symbol, as SVG for the legend."""
        colour = "currentColor" if self.colour == INK else self.colour
        dash = DASHES.get(self.dash, "4 3")
        line = f"<path d='M1,8H{LEGEND_WIDTH - 1}' stroke='{colour}' stroke-width='2' stroke-dasharray='{dash}'/>"
        shape = SHAPES.get(self.symbol.removesuffix("-open"), "")
        fill = "none" if self.symbol.endswith("-open") else colour
        symbol = f"<path transform='translate({LEGEND_WIDTH / 2:g} 8) scale(.85)' d='{shape}' fill='{fill}'"
        return (
            f"<svg width='{LEGEND_WIDTH}' height='16' aria-hidden='true'>{line}"
            f"{symbol} stroke='{colour}' stroke-width='1.5'/></svg>"
        )


class Styles:
    """Styles of all runs of a page: a colour for each method, a symbol for each row, a line style for each sparsity."""

    def __init__(self, rows: Iterable[RunRow]) -> None:
        sparse = [row for row in rows if not row.is_dense]
        self.methods = sorted({row.method for row in sparse})
        self.series = sorted({row.name for row in sparse})
        self.sparsities = sorted({row.sparsity for row in sparse})

    def of(self, row: RunRow) -> Style:
        if row.is_dense:
            return Style(INK, "", "dash")
        colour = COLOURS[self.methods.index(row.method) % len(COLOURS)]
        symbol = SYMBOLS[self.series.index(row.name) % len(SYMBOLS)]
        return Style(colour, symbol, self.dash(row.sparsity))

    def dash(self, sparsity: float) -> str:
        """Line style of a sparsity."""
        return [*DASHES][self.sparsities.index(sparsity) % len(DASHES)]


def of_row(row: RunRow, *, is_series: bool = False) -> Json:
    """The fields by which the legend hides a trace: its row and, unless it is of all sparsities, its sparsity."""
    sparsity = "" if row.is_dense or is_series else in_full(row.sparsity)
    return {"type": "scatter", "legendgroup": row.name, "meta": sparsity, "name": row.label}


def axis(title: str, **more: Any) -> Json:
    return {"title": {"text": title}, "automargin": True, "zeroline": False, **more}


def layout(x: Json, y: Json, **more: Any) -> Json:
    """The common layout of all charts. page.js sets sizes and colours."""
    margin = {"l": 10, "r": 16, "t": 16, "b": 52}
    return {"xaxis": x, "yaxis": y, "margin": margin, "showlegend": False, "hovermode": "closest", **more}


def short(value: float) -> str:
    """Format a number for a table: up to five digits, with thousands separators."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.5g}" if abs(value) < 1e5 else f"{value:,.0f}"


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

    @property
    def is_share(self) -> bool:
        """True for a fraction that changes in steps. The largest of the branches of a fork counts, not their mean."""
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
        Quantity("quality", over, on_data, quality),
        Quantity("loss", "Loss over time", "training loss", loss),
        Quantity("live", "Live weights over time", f"live weights {share}", live),
        Quantity("explored", "Weights ever explored", f"ever trained {share}", explored),
        Quantity("churn", "Mask churn", "changed by the last edit (fraction of live)", churn),
    ]


def charts_over_time(group: Group, styles: Styles) -> list[Chart]:
    """The charts over time for which any run has numbers."""
    return [chart for quantity in quantities(group) if (chart := _chart_over_time(quantity, group, styles))]


def _chart_over_time(quantity: Quantity, group: Group, styles: Styles) -> Chart | None:
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
        [trace for row, seeds in found for trace in _traces_over_time(quantity, row, seeds, styles)],
        layout(axis("epoch", rangemode="tozero"), y),
        ["epoch", *(row.label for row, _ in found)],
        [[round(key[0], 4) if key[0] % 1 else int(key[0]), *(points.get(key) for points in means)] for key in keys],
    )


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
    join = max if quantity.is_share else statistics.mean
    return {key: float(join(values)) for key, values in found.items()}


def _phases(record: Record) -> Iterator[tuple[Key, Json]]:
    """The start of each phase. A phase that a kill undid counts once."""
    ends = [(entry["iteration"], entry["epoch"]) for entry in record.history if entry.get("iteration")]
    per_epoch = max((iteration / epoch for iteration, epoch in ends if epoch), default=0)
    wanted: disk.Names = {"index": int, "stage": int, "iteration": int, "alive": int}
    events = [event for event in record.events if event["event"] == "phase" and not disk.fault(event, wanted)]
    for event in {event["index"]: event for event in events}.values() if per_epoch else ():
        yield (event["iteration"] / per_epoch, True, event["stage"]), event


def _traces_over_time(quantity: Quantity, row: RunRow, seeds: dict[Key, list[float]], styles: Styles) -> list[Json]:
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
    faint = FAINT_INK if style.colour == INK else f"{style.colour}2e"
    edge = {**same, "mode": "lines", "line": {"width": 0, "shape": shape}, "showlegend": False, "hoverinfo": "skip"}
    return [{**edge, "y": low}, {**edge, "y": high, "fill": "tonexty", "fillcolor": faint}, line]


Layer = tuple[str, int, float | None, float]
"""A layer: name of its weight, number of weights, target (None with a global allocation), and sparsity."""


def layer_chart(group: Group, styles: Styles) -> Chart | None:
    """One line per row over the layers, with crosses for the targets, if there are any."""
    found = [(row, layers) for row in group.sparse if (layers := _layers(row))]
    if not found:
        return None
    # numbers instead of names, which would be as wide as a phone
    most = max(len(layers) for _, layers in found)
    x = axis("layer, from input to output", tickformat="d", tick0=1, dtick=max(1, -(-most // 10)))
    return Chart(
        "layers",
        "Sparsity of each layer",
        "A high line means that most of the layer was pruned. Crosses are the targets of layers; a method without "
        "crosses ranks all layers together. The table has the names of the layers.",
        [trace for row, layers in found for trace in _traces_by_layer(row, layers, styles)],
        layout(x, axis("sparsity", tickformat=".0%", range=[-0.03, 1.05])),
        ["run", "layer", "weight", "size", "target", "sparsity"],
        [[row.label, number, *layer] for row, layers in found for number, layer in enumerate(layers, 1)],
    )


def _traces_by_layer(row: RunRow, layers: Sequence[Layer], styles: Styles) -> list[Json]:
    style = styles.of(row)
    same: Json = {**of_row(row), "x": list(range(1, len(layers) + 1)), "customdata": [layer[0] for layer in layers]}
    said = f"{row.label}<br>%{{customdata}}"
    reached: Json = {**same, "y": [layer[3] for layer in layers], "mode": "lines+markers"}
    reached |= {"line": style.line(width=1.5), "marker": style.marker(size=7)}
    reached["hovertemplate"] = f"{said}: %{{y:.2%}}<extra></extra>"
    if all(target is None for _, _, target, _ in layers):
        return [reached]
    aimed: Json = {**same, "y": [layer[2] for layer in layers], "mode": "markers", "showlegend": False}
    aimed["marker"] = {"color": style.colour, "symbol": "x-thin", "size": 13}
    aimed["marker"]["line"] = {"color": style.colour, "width": 1.5}
    aimed["hovertemplate"] = f"{said}: target %{{y:.2%}}<extra></extra>"
    return [reached, aimed]


def _layers(row: RunRow) -> list[Layer]:
    """Means over seeds. With a global allocation, layers differ between seeds."""
    of_seeds = [run.result.sparsity["rows"] for run in row.runs if run.result is not None]
    layers: list[Layer] = []
    for same in zip(*filter(None, of_seeds), strict=False):
        sparsity = statistics.mean(layer["sparsity"] for layer in same)
        layers.append((same[0]["name"], same[0]["size"], same[0].get("target"), sparsity))
    return layers


@dataclass(frozen=True)
class Cost:
    """The x axis of a chart of quality."""

    name: str
    figure: str
    """An attribute of Record."""
    tickformat: str
    caption: str
    """{up} and {above} are replaced by the direction of better scores."""

    def of(self, row: RunRow) -> float | None:
        """The cost of a row. All runs of a row have one target, which a mean over seeds would round."""
        return row.sparsity if self.name == "sparsity" else row.mean(self.figure)


COSTS = (
    Cost("sparsity", "sparsity", "~%", "The dashed line is the dense model; a point on or {above} it lost nothing."),
    Cost("training FLOPs", "training_flops", ".0%", "The compute for training, of dense. {up} and left is better."),
    Cost("inference FLOPs", "inference_flops", ".0%", "The compute for one example if zeros are skipped, of dense."),
    Cost("peak live weights", "peak_alive", ".0%", "At 100 % a method needs memory for the dense model."),
    Cost("average live weights", "average_alive", ".0%", "About what training could cost."),
    Cost("peak memory", "peak_bytes", "~s", "Compare only runs on one machine with the same storage."),
)


def frontier_charts(group: Group, styles: Styles) -> list[Chart]:
    """One chart for each cost that the runs have numbers for."""
    return [chart for cost in COSTS if (chart := _chart(cost, group, styles))]


def _chart(cost: Cost, group: Group, styles: Styles) -> Chart | None:
    shown = [row for row in group.sparse if cost.of(row) is not None and row.mean("test") is not None]
    if not shown:
        return None
    rows = [*(row for row in group.dense if row.mean("test") is not None), *shown]
    up, above = ("Down", "below") if group.metric.lower_is_better else ("Up", "above")
    title, caption = f"Quality against {cost.name}", cost.caption.format(up=up, above=above)
    quality = axis(f"{group.metric.name}, test data")
    if cost.name == "sparsity" and len({row.sparsity for row in shown}) == 1:
        title, caption = "Quality of each row", "The best row is at the top. The dashed line is the dense model."
        data, made = _row_by_row(rows, quality, group, styles)
    else:
        data, made = _against(cost, rows, quality, styles)
    spreads = [(row, row.spread("test")) for row in rows]
    has_bars = any(spread.deviation is not None for _, spread in spreads)
    return Chart(
        f"quality-{cost.name.replace(' ', '-')}",
        title,
        caption + (" Bars are one standard deviation over seeds." if has_bars else ""),
        data,
        made,
        ["run", "sparsity", cost.name, f"{group.metric.name} (mean)", "standard deviation", "seeds"],
        [[r.label, r.sparsity, cost.of(r), s.mean, s.deviation, s.count] for r, s in spreads],
    )


def _row_by_row(rows: list[RunRow], quality: Json, group: Group, styles: Styles) -> tuple[list[Json], Json]:
    """Data and layout for one sparsity: each row has a line of its own."""
    sign = 1 if group.metric.lower_is_better else -1
    rows = sorted(rows, key=lambda row: sign * (row.mean("test") or 0.0))
    names = [row.label for row in reversed(rows)]
    places = axis("", type="category", ticksuffix=" ", categoryorder="array", categoryarray=names)
    data, lines = [], []
    for row in rows:
        style, spread = styles.of(row), row.spread("test")
        trace = {**of_row(row), "mode": "markers", "x": [spread.mean], "y": [row.label]}
        trace["marker"] = DENSE_POINT if row.is_dense else style.marker(size=11)
        trace["error_x"] = {"type": "data", "array": [spread.deviation or 0.0], "width": 4, "color": style.colour}
        data.append(trace | {"hovertemplate": f"{row.label}, {spread.count} seeds<br>%{{x:.4g}}<extra></extra>"})
        if row.is_dense:
            ends = {"x0": spread.mean, "x1": spread.mean, "y0": 0, "y1": 1}
            lines.append({"type": "line", "yref": "paper", "line": DENSE_LINE, **ends})
    return data, layout(quality, places, shapes=lines)


def _against(cost: Cost, rows: list[RunRow], quality: Json, styles: Styles) -> tuple[list[Json], Json]:
    """Data and layout for a cost on the x axis: a line for each row over its sparsities."""
    by_name: dict[str, list[RunRow]] = {}
    for row in rows:
        if not row.is_dense:
            by_name.setdefault(row.name, []).append(row)
    xs = [cost.of(row) or 0.0 for same in by_name.values() for row in same]
    lines = [_line(same, cost, styles) for same in by_name.values()]
    x = axis(cost.name, tickformat=cost.tickformat)
    if cost.name == "sparsity":  # few and round, so they are the ticks
        gap = min(b - a for a, b in pairwise(sorted(set(xs))))
        x |= {"tickvals": sorted(set(xs)), "range": [min(xs) - 0.5 * gap, max(xs) + 0.5 * gap]}
        for number, line in enumerate(lines):  # a little apart, so that all are visible
            line["x"] = [each + 0.7 * gap * ((number + 0.5) / len(lines) - 0.5) for each in line["x"]]
    return [*(trace for row in rows if row.is_dense for trace in _dense(row, cost, xs)), *lines], layout(x, quality)


def _line(rows: list[RunRow], cost: Cost, styles: Styles) -> Json:
    found = sorted((cost.of(row) or 0.0, row.label, row.spread("test")) for row in rows)
    style = styles.of(rows[0])
    trace: Json = {**of_row(rows[0], is_series=True), "name": rows[0].name, "mode": "lines+markers"}
    trace |= {"x": [x for x, _, _ in found], "y": [spread.mean for _, _, spread in found]}
    trace |= {"line": style.line(width=1.5, dash="solid"), "marker": style.marker(size=11)}
    trace["error_y"] = {"type": "data", "array": [spread.deviation or 0.0 for _, _, spread in found], "width": 4}
    trace["customdata"] = [f"{label}, {spread.count} seeds" for _, label, spread in found]
    at = "" if cost.name == "sparsity" else f" at %{{x:{cost.tickformat}}}"
    trace["hovertemplate"] = f"%{{customdata}}<br>%{{y:.4g}}{at}<extra></extra>"
    return trace


DENSE_LINE: Json = {"color": INK, "dash": "dash", "width": 1.5}
DENSE_POINT: Json = {"color": INK, "symbol": "asterisk", "size": 11, "line": {"color": INK, "width": 1.5}}


def _dense(row: RunRow, cost: Cost, xs: list[float]) -> list[Json]:
    """The dense model as a line, and as a point if it has a cost on the axis."""
    x, y = None if cost.name == "sparsity" else cost.of(row), row.mean("test")
    ends = [min(xs), max(xs)] if x is None else [min(*xs, x), max(*xs, x)]
    if x is None or ends[0] == ends[1]:
        ends = [ends[0] * 0.98, ends[1] * 1.02]
    line: Json = {**of_row(row), "mode": "lines", "x": ends, "y": [y, y], "line": DENSE_LINE}
    line["hovertemplate"] = f"{row.label}, {row.epochs:g} epochs<br>%{{y:.4g}}<extra></extra>"
    if x is None:
        return [line]
    point: Json = {**of_row(row), "mode": "markers", "x": [x], "y": [y], "marker": DENSE_POINT, "showlegend": False}
    point["hovertemplate"] = f"{row.label}<br>%{{y:.4g}} at %{{x:{cost.tickformat}}}<extra></extra>"
    return [line, point]
