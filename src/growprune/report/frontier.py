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
    figure: Figure
    tickformat: str
    caption: str
    """{up} and {above} are replaced by the direction of better scores."""

    def of(self, row: RunRow) -> float | None:
        """The cost of a row. All runs of a row have one target, which a mean over seeds would round."""
        return row.sparsity if self.name == "sparsity" else row.mean(self.figure)


COSTS = (
    Cost("sparsity", "sparsity", "~%", "The dashed line is the dense model; a point on or {above} it lost nothing."),
    Cost("training FLOPs", training_flops, "~s", "The compute for training. {up} and left is better."),
    Cost("inference FLOPs", inference_flops, "~s", "The compute for one example if zeros are skipped."),
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
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": DENSE_LINE}
    lines = [{**line, "x0": row.mean("test"), "x1": row.mean("test")} for row in rows if row.is_dense]
    return [_dot(row, "test", 1, styles) for row in rows], layout(quality, rows_axis(rows), shapes=lines)


def _dot(row: RunRow, figure: Figure, unit: float, styles: Styles) -> Json:
    """The point of a row on a line of its own, with a bar for its deviation."""
    style, spread = styles.of(row), row.spread(figure)
    trace = {**of_row(row), "mode": "markers", "x": [(spread.mean or 0.0) / unit], "y": [row.label]}
    trace["marker"] = DENSE_POINT if row.is_dense else style.marker(size=11)
    bar = [(spread.deviation or 0.0) / unit]
    trace["error_x"] = {"type": "data", "array": bar, "width": 4, "color": style.colour}
    return trace | {"hovertemplate": f"{row.label}, {spread.count} seeds<br>%{{x:.4g}}<extra></extra>"}


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


def time_chart(group: Group, styles: Styles) -> Chart | None:
    """The measured training time."""
    rows = [row for row in group.rows if row.mean("seconds") is not None]
    if not rows:
        return None
    rows.sort(key=lambda row: row.mean("seconds") or 0.0)
    most = rows[-1].mean("seconds") or 0.0
    unit, size = ("hours", 3600) if most > 7200 else ("minutes", 60) if most > 120 else ("seconds", 1)
    spreads = [(row, row.spread("seconds")) for row in rows]
    return Chart(
        "time",
        "Training time",
        f"The {unit} that a run took. Compare only runs that had the same kind of machine to themselves.",
        [_dot(row, "seconds", size, styles) for row in rows],
        layout(axis(unit, rangemode="tozero"), rows_axis(rows)),
        ["run", "seconds (mean)", "standard deviation", "seeds"],
        [[row.label, time.mean, time.deviation, time.count] for row, time in spreads],
    )
