"""The sparsity of each layer, and its target."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from growprune.report.chart import Chart, Styles, axis, layout
from growprune.report.groups import Cell, Group
from growprune.runs.result import Json

Row = tuple[str, int, float | None, float]
"""A layer: name of its weight, number of weights, target (None with a global allocation), and sparsity."""


def layer_chart(group: Group, styles: Styles) -> Chart | None:
    """One line per method over the layers, with crosses for the targets, if there are any."""
    found = {cell.label: (cell, rows) for cell in group.sparse if (rows := _rows(cell))}
    if not found:
        return None
    data = [trace for cell, rows in found.values() for trace in _traces(cell, rows, styles)]
    # numbers instead of names, which would be as wide as a phone
    most = max(len(rows) for _, rows in found.values())
    x = axis("layer, from input to output", tickformat="d", tick0=1, dtick=max(1, -(-most // 10)))
    return Chart(
        "layers",
        "Sparsity of each layer",
        "A high line means that most of the layer was pruned. Crosses are the targets of layers; a method without "
        "crosses ranks all layers together. The table has the names of the layers.",
        data,
        layout(x, axis("sparsity", tickformat=".0%", range=[-0.03, 1.05])),
        ["run", "layer", "weight", "size", "target", "sparsity"],
        [
            [label, number, name, size, target, sparsity]
            for label, (_, rows) in found.items()
            for number, (name, size, target, sparsity) in enumerate(rows, 1)
        ],
    )


def _traces(cell: Cell, rows: Sequence[Row], styles: Styles) -> list[Json]:
    style = styles.of(cell)
    numbers, names = list(range(1, len(rows) + 1)), [row[0] for row in rows]
    same: Json = {"type": "scatter", "x": numbers, "customdata": names, "legendgroup": cell.label}
    said = f"{cell.label}<br>%{{customdata}}"
    reached: Json = {**same, "y": [row[3] for row in rows], "name": cell.label, "mode": "lines+markers"}
    reached |= {"line": style.line(width=1.5), "marker": style.marker(size=7)}
    reached["hovertemplate"] = f"{said}: %{{y:.2%}}<extra></extra>"
    if all(target is None for _, _, target, _ in rows):
        return [reached]
    aimed: Json = {**same, "y": [row[2] for row in rows], "name": f"{cell.label}: target", "mode": "markers"}
    aimed |= {"marker": {"color": style.colour, "symbol": "x-thin", "size": 13}, "showlegend": False}
    aimed["marker"]["line"] = {"color": style.colour, "width": 1.5}
    aimed["hovertemplate"] = f"{said}: target %{{y:.2%}}<extra></extra>"
    return [reached, aimed]


def _rows(cell: Cell) -> list[Row]:
    """Means over seeds. With a global allocation, layers differ between seeds."""
    found = [record.result.sparsity["rows"] for record in cell.records if record.result is not None]
    rows: list[Row] = []
    for same in zip(*found, strict=False):
        sparsity = statistics.mean(row["sparsity"] for row in same)
        rows.append((same[0]["name"], same[0]["size"], same[0].get("target"), sparsity))
    return rows
