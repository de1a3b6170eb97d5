"""The sparsity of each layer, and its target."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from growprune.report.chart import Chart, Styles, axis, layout, of_row
from growprune.report.groups import Group
from growprune.runs.result import Json
from growprune.runs.table import RunRow

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
        [trace for row, layers in found for trace in _traces(row, layers, styles)],
        layout(x, axis("sparsity", tickformat=".0%", range=[-0.03, 1.05])),
        ["run", "layer", "weight", "size", "target", "sparsity"],
        [[row.label, number, *layer] for row, layers in found for number, layer in enumerate(layers, 1)],
    )


def _traces(row: RunRow, layers: Sequence[Layer], styles: Styles) -> list[Json]:
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
