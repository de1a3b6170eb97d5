"""The pictures of docs/results.md: quality against the peak of live weights. docs/pictures.py draws the others.

    python experiments/pictures.py      # writes docs/images/frontier*.svg

Plain SVG, from the results beside this file. Colours are readable on white and on black.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tables import STUDIES

HERE = Path(__file__).parent
IMAGES = HERE.parent / "docs" / "images"
GREY = "#808890"
RED, BLUE, GREEN = "#d62728", "#1f77b4", "#2ca02c"
SERIES = (
    ("dense", "dense", GREY),
    ("DPF", "dpf:", GREY),
    ("GMP", "gmp:", GREY),
    ("AC/DC", "acdc:", GREY),
    ("RigL", "rigl:", GREY),
    ("C-GaP (paper)", "cyclic_gap:", GREY),
    ("GraNet", "granet:global", GREEN),
    ("never growing", "gradual_gap:global (peak_density=[0-9.]+ )?control=peak", BLUE),
    ("gradual_gap", "gradual_gap:global( peak_density=[0-9.]+)?$", RED),
)
"""What plans are called in the picture, how the names of their rows begin, and their colours."""


def svg(width: int, height: int, body: list[str], title: str) -> str:
    """Drawn for the width of a phone, where letters are still to be read, and shown a little larger elsewhere."""
    size = f'width="{1.2 * width:g}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" role="img">'
    return "\n".join([head, f"<title>{title}</title>", *body, "</svg>\n"])


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 15, colour: str = GREY) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


@dataclass(frozen=True)
class Frame:
    """Where a share of the weights and a score are in a picture."""

    low: float
    high: float
    left: float = 56.0
    bottom: float = 316.0

    def at(self, peak: float, score: float) -> tuple[float, float]:
        return self.left + 410 * peak, self.bottom - (score - self.low) / (self.high - self.low) * 300

    def draw(self, unit: str) -> list[str]:
        body = []
        for value in range(math.ceil(self.low), math.floor(self.high) + 1):
            _, y = self.at(0, value)
            ends = f'x1="{self.left}" x2="{self.left + 570}" y1="{y:g}" y2="{y:g}"'
            body += [f'<line {ends} stroke="{GREY}" stroke-opacity="0.3"/>']
            body += [text(self.left - 8, y + 5, f"{value}{unit}", anchor="end")]
        for share in (0.1, 0.25, 0.5, 0.75, 1.0):
            body.append(text(self.at(share, 0)[0], self.bottom + 20, f"{100 * share:.0f} %", anchor="middle"))
        return [*body, text(self.left, self.bottom + 46, "most weights alive at any time, as a share of dense")]


Points = list[tuple[float, float]]


def series(study: str) -> Iterator[tuple[str, str, Points]]:
    """Of each plan its name, its colour, and its peaks with their test scores, at 90 %."""
    rows = next(each for each in STUDIES if each.name == study).compared().rows
    for name, begins, colour in SERIES:
        found = [(row.mean("peak_alive"), row.mean("test")) for row in rows if re.match(begins, row.name)]
        if found:
            yield name, colour, sorted((peak, score) for peak, score in found if peak is not None and score is not None)


def apart(places: Sequence[float], room: float) -> list[float]:
    """Heights as near to the given ones as leaves room between any two, from the top."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + room) if moved else place)
    return moved


def frontier(study: str, frame: Frame, unit: str, title: str) -> str:
    """Test scores against the largest share of the weights that ever lived, each plan named at its last point."""
    body, ends, elsewhere = frame.draw(unit), [], []
    right, _ = frame.at(0.99, 0)
    for name, colour, points in series(study):
        places = [frame.at(*point) for point in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        body.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>' for x, y in places]
        end = (*places[-1], f"{name}, {points[-1][1]:.1f}", colour)
        if end[0] > right:
            ends.append(end)
        else:  # below its point, and off its line
            elsewhere.append((*end, "middle" if len(points) == 1 else "start"))
    beside = sorted(ends, key=lambda end: end[1])
    heights = apart([y for _, y, _, _ in beside], 17)  # names at the right edge stand one below the other
    body += [text(x + 10, y + 5, words, colour=c) for (x, _, words, c), y in zip(beside, heights, strict=True)]
    body += [text(x, y + 22, words, anchor=anchor, colour=c) for x, y, words, c, anchor in elsewhere]
    return svg(640, 374, body, title)


def cifar10() -> str:
    title = "ResNet-18 (width 32) on CIFAR-10 at 90 % sparsity, 60 epochs: accuracy against peak"
    return frontier("cifar10-width32-frontier", Frame(86.5, 90.2), " %", title)


def multi30k() -> str:
    title = "A Transformer on Multi30k at 90 % sparsity, 40 epochs: BLEU against peak"
    return frontier("multi30k-frontier", Frame(33.8, 39.8), "", title)


PICTURES = {"frontier.svg": cifar10, "frontier-multi30k.svg": multi30k}


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw())


if __name__ == "__main__":
    main()
