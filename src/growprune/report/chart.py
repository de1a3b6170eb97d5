"""A chart as a value: the Plotly data, its table, and a caption that says what to see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from growprune.methods import METHODS
from growprune.runs.metric import in_full
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
    def faint(self) -> str:
        """The colour of a band."""
        return FAINT_INK if self.colour == INK else f"{self.colour}2e"

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
    """Styles of all runs of a page: a colour for each method, a symbol for each row, a line style for each sparsity.

    Methods are in the order of `growprune list`, then unknown ones.
    """

    def __init__(self, rows: Iterable[RunRow]) -> None:
        order = [*METHODS]
        sparse = [row for row in rows if not row.is_dense]
        ranks = {row.method: order.index(row.method) if row.method in order else len(order) for row in sparse}
        self.methods = sorted(ranks, key=lambda name: (ranks[name], name))
        series = {row.name: (ranks[row.method], row.name) for row in sparse}
        self.series = sorted(series, key=lambda name: series[name])
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


def rows_axis(rows: Sequence[RunRow]) -> Json:
    """An axis with one place for each row, the first at the top."""
    names = [row.label for row in reversed(rows)]
    return axis("", type="category", ticksuffix=" ", categoryorder="array", categoryarray=names)


def short(value: float) -> str:
    """Format a number for a table: up to five digits, with thousands separators."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.5g}" if abs(value) < 1e5 else f"{value:,.0f}"
