"""A chart as a value: the Plotly data, its table, and a caption that says what to see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from growprune.methods import METHODS
from growprune.report.groups import Cell
from growprune.runs.result import Json

Value = str | float | int | None

COLOURS = (
    *("#1a7fc4", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#4aa3df", "#8c6bb1", "#7f7f00"),
    *("#e0559b", "#3f8f8f", "#a0522d", "#6b7fd7"),
)
"""Distinct in most forms of colour blindness, and visible on white and black. The first eight follow Okabe and Ito."""
FILLED = (
    *("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "pentagon", "star", "hexagon"),
    *("triangle-left", "triangle-right", "bowtie", "hourglass"),
)
SYMBOLS = (*FILLED, *(f"{symbol}-open" for symbol in FILLED))
"""More symbols than methods, so that methods differ even where colours repeat."""
DASHES = ("solid", "dot", "dashdot", "longdash", "longdashdot")
INK = "ink"
"""A placeholder that page.js replaces by the colour of the text, for lines that are not methods."""


@dataclass(frozen=True)
class Chart:
    name: str
    """Name of downloaded files."""
    title: str
    caption: str
    data: list[Json]
    layout: Json
    columns: Sequence[str]
    """Columns of the table of the chart."""
    rows: Sequence[Sequence[Value]]
    height: int = 420


@dataclass(frozen=True)
class Style:
    """Look of a method, the same in every chart of a page. Methods never differ by colour alone."""

    colour: str
    symbol: str
    dash: str

    def line(self, **more: Any) -> Json:
        return {"color": self.colour, "dash": self.dash, "width": 2, **more}

    def marker(self, **more: Any) -> Json:
        return {"color": self.colour, "symbol": self.symbol, "size": 10, **more}


class Styles:
    """Styles of all runs of a page: one colour per method, one symbol per series, one line style per sparsity.

    Methods are in the order of `growprune list`, then unknown ones.
    """

    def __init__(self, cells: Iterable[Cell]) -> None:
        order = [*METHODS]
        sparse = [cell for cell in cells if not cell.is_dense]
        ranks = {cell.method: order.index(cell.method) if cell.method in order else len(order) for cell in sparse}
        self.methods = sorted(ranks, key=lambda name: (ranks[name], name))
        series = {cell.series: (ranks[cell.method], cell.series) for cell in sparse}
        self.series = sorted(series, key=lambda name: series[name])
        self.sparsities = [sparsity for sparsity, _ in Counter(sorted(cell.sparsity for cell in sparse)).most_common()]

    def of(self, cell: Cell) -> Style:
        if cell.is_dense:
            return Style(INK, "asterisk-open", "dash")
        colour = COLOURS[self.methods.index(cell.method) % len(COLOURS)]
        symbol = SYMBOLS[self.series.index(cell.series) % len(SYMBOLS)]
        # the most common sparsity has a solid line; dashes are for the dense model
        return Style(colour, symbol, DASHES[self.sparsities.index(cell.sparsity) % len(DASHES)])


def axis(title: str, **more: Any) -> Json:
    return {"title": {"text": title}, "automargin": True, "zeroline": False, **more}


def layout(x: Json, y: Json, **more: Any) -> Json:
    """The common layout of all charts. page.js sets the colours."""
    return {
        "xaxis": x,
        "yaxis": y,
        "margin": {"l": 10, "r": 16, "t": 16, "b": 10},
        "legend": {"orientation": "h", "yanchor": "top", "y": -0.22, "x": 0},
        "hovermode": "closest",
        **more,
    }


def short(value: float) -> str:
    """Format a number for a table: up to five digits, with thousands separators."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.5g}" if abs(value) < 1e5 else f"{value:,.0f}"
