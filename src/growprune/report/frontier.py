"""Charts of quality against sparsity, FLOPs, live weights and memory, and of training time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from growprune.report.chart import INK, Chart, Styles, axis, layout, of_row, rows_axis
from growprune.report.groups import Group
from growprune.report.tables import inference_flops, training_flops
from growprune.runs.result import Json
from growprune.runs.table import Figure, RunRow


@dataclass(frozen=True)
class Cost:
    """The x axis of a chart of quality."""

    name: str
    axis: str
    caption: str
    """{up} and {above} are replaced by the direction of better scores."""
    of: Figure
    tickformat: str


COSTS = (
    Cost(
        "sparsity",
        "sparsity",
        "Quality as more weights are removed. The dashed line is the dense model; a point on or {above} it lost "
        "nothing. Points of one sparsity are drawn side by side.",
        "sparsity",
        "~%",
    ),
    Cost(
        "training FLOPs",
        "training FLOPs",
        "The compute that each method needed for training. {up} and left is better.",
        training_flops,
        "~s",
    ),
    Cost(
        "inference FLOPs",
        "theoretical FLOPs per example",
        "The compute that the trained model needs per example if zeros are skipped. {up} and left is better.",
        inference_flops,
        "~s",
    ),
    Cost(
        "peak live weights",
        "peak live weights (fraction)",
        "The largest size of the model during training. A method at 100 % needs memory for the dense model.",
        "peak_alive",
        ".0%",
    ),
    Cost(
        "average live weights",
        "average live weights (fraction)",
        "The average size of the model during training, which is about what training could cost.",
        "average_alive",
        ".0%",
    ),
    Cost(
        "peak memory",
        "measured peak bytes",
        "Measured peak memory: of the GPU, or of the whole process on a CPU. Compare only runs on one machine with the "
        "same storage.",
        "peak_bytes",
        "~s",
    ),
)


def frontier_charts(group: Group, styles: Styles) -> list[Chart]:
    """One chart for each cost that the runs have numbers for."""
    return [chart for cost in COSTS if (chart := _chart(cost, group, styles))]


def _chart(cost: Cost, group: Group, styles: Styles) -> Chart | None:
    shown = [row for row in group.sparse if row.mean(cost.of) is not None and row.mean("test") is not None]
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
        ["run", "sparsity", cost.axis, f"{group.metric.name} (mean)", "standard deviation", "seeds"],
        [[r.label, r.sparsity, r.mean(cost.of), s.mean, s.deviation, s.count] for r, s in spreads],
    )


def _row_by_row(rows: list[RunRow], quality: Json, group: Group, styles: Styles) -> tuple[list[Json], Json]:
    """Data and layout for one sparsity: each row has a line of its own."""
    sign = 1 if group.metric.lower_is_better else -1
    rows = sorted(rows, key=lambda row: sign * (row.mean("test") or 0.0))
    data = []
    for row in rows:
        style, spread = styles.of(row), row.spread("test")
        trace = {**of_row(row), "mode": "markers", "x": [spread.mean], "y": [row.label]}
        trace["marker"] = DENSE_POINT if row.is_dense else style.marker(size=11)
        trace["error_x"] = {"type": "data", "array": [spread.deviation or 0.0], "width": 4, "color": style.colour}
        trace["hovertemplate"] = f"{row.label}, {spread.count} seeds<br>%{{x:.4g}}<extra></extra>"
        data.append(trace)
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": DENSE_LINE}
    lines = [{**line, "x0": row.mean("test"), "x1": row.mean("test")} for row in rows if row.is_dense]
    return data, layout(quality, rows_axis(rows), shapes=lines)


def _against(cost: Cost, rows: list[RunRow], quality: Json, styles: Styles) -> tuple[list[Json], Json]:
    """Data and layout for a cost on the x axis: a line for each row over its sparsities."""
    by_name: dict[str, list[RunRow]] = {}
    for row in rows:
        if not row.is_dense:
            by_name.setdefault(row.name, []).append(row)
    xs = [row.mean(cost.of) or 0.0 for same in by_name.values() for row in same]
    lines = [_line(same, cost, styles) for same in by_name.values()]
    x = axis(cost.axis, tickformat=cost.tickformat)
    if cost.name == "sparsity":  # few and round, so they are the ticks
        gap = min(b - a for a, b in pairwise(sorted(set(xs))))
        x |= {"tickvals": sorted(set(xs)), "range": [min(xs) - 0.5 * gap, max(xs) + 0.5 * gap]}
        for number, line in enumerate(lines):  # a little apart, so that all are visible
            line["x"] = [each + 0.7 * gap * ((number + 0.5) / len(lines) - 0.5) for each in line["x"]]
    return [*(trace for row in rows if row.is_dense for trace in _dense(row, cost, xs)), *lines], layout(x, quality)


def _line(rows: list[RunRow], cost: Cost, styles: Styles) -> Json:
    found = sorted((row.mean(cost.of) or 0.0, row.label, row.spread("test")) for row in rows)
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
    x, y = None if cost.name == "sparsity" else row.mean(cost.of), row.mean("test")
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


def time_chart(group: Group, styles: Styles) -> Chart | None:
    """The measured training time."""
    found = [(row, time) for row in group.rows if (time := row.spread("seconds")).mean is not None]
    if not found:
        return None
    found.sort(key=lambda item: item[1].mean or 0.0)
    most = max(time.mean or 0.0 for _, time in found)
    unit, size = ("hours", 3600) if most > 7200 else ("minutes", 60) if most > 120 else ("seconds", 1)
    data = []
    for row, time in found:
        shown = (time.mean or 0.0) / size
        bar = {**of_row(row), "type": "bar", "orientation": "h", "x": [shown], "y": [row.label]}
        bar |= {"marker": {"color": styles.of(row).colour}, "text": [f"{shown:.3g}"], "textangle": 0}
        bar |= {"hovertemplate": f"%{{y}}: %{{x:.4g}} {unit}<extra></extra>"}
        bar |= {"textposition": "inside", "insidetextanchor": "start"}
        if time.deviation:
            bar["error_x"] = {"type": "data", "array": [time.deviation / size], "width": 4, "color": INK}
        data.append(bar)
    return Chart(
        "time",
        "Training time",
        f"The {unit} that a run took. Compare only runs that had the same kind of machine to themselves.",
        data,
        layout(axis(unit, rangemode="tozero"), rows_axis([row for row, _ in found]), barmode="overlay"),
        ["run", "seconds (mean)", "standard deviation", "seeds"],
        [[row.label, time.mean, time.deviation, time.count] for row, time in found],
    )
