"""The charts of README.md beside this file, from the figures kept beside this file, as SVG and with nothing but Python.

python experiments/theory/draw.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 320, 60, 34, 190, 44
COLOURS = ("#0b6e99", "#d9480f", "#2b8a3e", "#9c36b5", "#e8a200", "#495057", "#c2255c", "#1098ad")


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False


def chart(title: str, x_name: str, y_name: str, lines: Sequence[Line], ticks: Sequence[tuple[float, str]]) -> str:
    """A line chart; y begins at 0, and ends at a round number."""
    right, top = (
        max(x for line in lines for x, _ in line.points),
        _above(max(y for line in lines for _, y in line.points)),
    )
    left = min(x for line in lines for x, _ in line.points)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        return LEFT + across, HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    drawn = [_text(LEFT, 20, f"{title}: {y_name}", size=13), _text(WIDTH - RIGHT, HEIGHT - 8, x_name, anchor="end")]
    for part in range(5):
        x, y = place(left, top * part / 4)
        drawn.append(f'<line x1="{x:.1f}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dee2e6"/>')
        drawn.append(_text(x - 6, y + 4, f"{top * part / 4:.3g}", anchor="end"))
    drawn += [_text(place(x, 0)[0], HEIGHT - BOTTOM + 16, label, anchor="middle") for x, label in ticks]
    for i, line in enumerate(lines):
        drawn += _line(i, line, [place(x, y) for x, y in line.points])
    body = "\n".join(drawn)
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    style = 'font-family="sans-serif" font-size="11" fill="#212529"'
    paper = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{paper}\n{body}\n</svg>\n'


def _above(value: float) -> float:
    """The next of 1, 1.2, 1.6, 2, 2.4, 4, 6, 8 times a power of ten, whose quarters are short to write."""
    power = 10.0 ** math.floor(math.log10(value))
    return power * next(step for step in (1, 1.2, 1.6, 2, 2.4, 4, 6, 8, 10) if step * power >= value * 0.999)


def _line(i: int, line: Line, places: Sequence[tuple[float, float]]) -> list[str]:
    colour, dashes = COLOURS[i % len(COLOURS)], ' stroke-dasharray="5 4"' if line.is_dashed else ""
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    drawn = [f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>']
    drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in places]
    y, x = TOP + 16 * i + 8, WIDTH - RIGHT + 14
    drawn.append(f'<line x1="{x}" x2="{x + 18}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"{dashes}/>')
    return [*drawn, _text(x + 24, y + 4, line.name)]


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def explored(found: dict[str, Any]) -> str:
    lines = []
    for row in found["rows"]:
        means = [_mean(column) for column in zip(*row["coverage"], strict=True)]
        lines.append(Line(row["method"], list(zip(found["when"], means, strict=True)), row["method"] == "gmp"))
    ticks = [(when, f"{when:.0%}") for when in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)]
    return chart("Digits CNN at 90 %", "of the training", "share of weights that have ever lived", lines, ticks)


def mask_error(found: dict[str, Any]) -> str:
    lines = []
    for row in found["rows"]:
        means = [_mean(column) for column in zip(*(run["part"] for run in row["runs"]), strict=True)]
        name = f"{row['sparsity']:.0%}, {row['allocation']}, {'restarts' if row['restart'] else 'one curve'}"
        lines.append(Line(name, list(enumerate(means, 1)), not row["restart"]))
    ticks = [(float(q), str(q)) for q, _ in enumerate(found["rows"][0]["runs"][0]["part"], 1)]
    return chart("C-GaP on a digits CNN", "round", "delta² of the part that is pruned", lines, ticks)


def proposition(found: dict[str, Any]) -> str:
    lines = []
    for row in found["rows"]:
        if row["problem"] == "linear" and row["kappa"] == 4 and row["way"] == "proof":
            means = [_mean([run["gradient"] for run in runs]) for runs in row["runs"]]
            points = [(q**-0.5, mean) for q, mean in zip(found["rounds"], means, strict=True)]
            tail = "" if row["sparsity"] == 0 else ", steep" if row["tail"] else ", even"
            lines.append(
                Line(f"sparsity {row['sparsity']:g}{tail}", [(0.0, max(0.0, row["floor"])), *reversed(points)])
            )
    ticks = [(0.0, "fit, Q = ∞"), *((q**-0.5, f"Q = {q}") for q in found["rounds"][:-1])]
    return chart("Linear problem, as proven", "1 / √Q", "mean squared gradient", lines, ticks)


def main() -> None:
    for name, draw in (("explored", explored), ("mask_error", mask_error), ("proposition", proposition)):
        found = json.loads((HERE / f"{name}.json").read_text())
        (HERE / f"{name}.svg").write_text(draw(found))
        print(f"{name}.svg")


if __name__ == "__main__":
    main()
