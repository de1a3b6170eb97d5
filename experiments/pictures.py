"""The pictures of the README: the schedule of gradual_gap, and quality against peak memory on CIFAR-10.

    python experiments/pictures.py      # writes docs/images/*.svg

Plain SVG, from the plan itself and from the results beside this file. Colours are readable on white and on black.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from growprune.compare import of_runs
from growprune.methods import gradual_gap
from growprune.partition import Partition
from growprune.plan import Action, Part, Phase

HERE = Path(__file__).parent
IMAGES = HERE.parent / "docs" / "images"
GREY = "#808890"
STUDY = HERE / "compare" / "cifar10-width32"
POINTS = {
    "dense": ("dense", "right"),
    "dpf:global every=16": ("DPF", "right"),
    "gmp:global every=100": ("GMP", "right"),
    "acdc:global": ("AC/DC", "right"),
    "gradual_gap:global": ("gradual_gap", "right"),
    "gradual_gap:global control=peak": ("never growing", "right"),
    "gradual_gap:global control=start": ("never growing", "left"),
    "granet:erk every=100": ("GraNet", "right"),
    "cyclic_gap:uniform steps=8 epochs=3 finetune=36": ("C-GaP (paper)", "left"),
    "rigl:erk every=100": ("RigL", "right"),
    "static_random:erk": ("static", "right"),
}
"""Rows of the comparison at 90 %, what they are called, and on which side of the point there is room to say so."""


def svg(width: int, height: int, body: list[str], title: str) -> str:
    """Drawn for the width of a phone, where letters are still to be read, and shown a little larger elsewhere."""
    size = f'width="{1.2 * width:g}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" role="img">'
    return "\n".join([head, f"<title>{title}</title>", *body, "</svg>\n"])


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 15, colour: str = GREY) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


def densities(S: Partition, plan: list[Phase]) -> Iterator[tuple[int, list[float]]]:
    """Of each phase that trains, its length and the density of each part."""
    now = [1.0] * len(S)
    for phase in plan:
        for edit in phase.edits:
            for i, part in enumerate(S):
                is_of = edit.part in (part, S.whole)
                now[i] = 1 - (edit.to or 0.0) if is_of and (edit.action is Action.PRUNE or edit.to == 0) else now[i]
        if phase.iterations:
            yield phase.iterations, list(now)


def schedule() -> str:
    """Four parts over time: the darker, the denser."""
    S = Partition(tuple(Part(f"S{i}", (f"{i}.weight",)) for i in range(4)))
    plan = [stage for stage in gradual_gap(S, sparsity=0.9, iterations=320, every=10) if isinstance(stage, Phase)]
    body, x = [], 64.0
    for length, parts in densities(S, plan):
        for i, density in enumerate(parts):
            shape = f'x="{x:g}" y="{10 + 34 * i}" width="{1.5 * length:g}" height="30"'
            body.append(f'<rect {shape} fill="#1f77b4" fill-opacity="{0.08 + 0.92 * density:.3f}"/>')
        x += 1.5 * length
    body += [text(54, 31 + 34 * i, f"part {i}", anchor="end") for i in range(4)]
    body += [text(64, 168, "47 % of the weights live"), text(x, 168, "fine-tuning, 10 % live", anchor="end")]
    return svg(560, 180, body, "Sparsity rises while one part after another is grown to dense and pruned back")


def frontier() -> str:
    """Test accuracy against the largest share of the weights that ever lived."""
    body, left, bottom, low, high = [], 56.0, 316.0, 86.5, 90.2

    def at(peak: float, top1: float) -> tuple[float, float]:
        return left + 460 * peak, bottom - (top1 - low) / (high - low) * 300

    for value in range(87, 91):
        _, y = at(0, value)
        body.append(f'<line x1="{left}" x2="{left + 570}" y1="{y:g}" y2="{y:g}" stroke="{GREY}" stroke-opacity="0.3"/>')
        body.append(text(left - 8, y + 5, f"{value} %", anchor="end"))
    for share in (0.1, 0.25, 0.5, 0.75, 1.0):
        body.append(text(at(share, low)[0], bottom + 20, f"{100 * share:.0f} %", anchor="middle"))
    rows = {row.name: row for row in of_runs([STUDY]).rows if row.sparsity in (0, 0.9)}
    for row, (name, side) in POINTS.items():
        top1, is_one = rows[row].summary["test"]["mean"], rows[row].summary["finished"] == 1
        x, y = at(rows[row].summary["peak_alive"], top1)
        colour = "#d62728" if name == "gradual_gap" else "#1f77b4"
        body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>')
        words, is_right = f"{name}, {top1:.1f}" + "*" * is_one, side == "right"
        body.append(text(x + 10 if is_right else x - 10, y + 5, words, anchor="start" if is_right else "end"))
    body.append(text(left, bottom + 46, "most weights alive at any time, as a share of dense"))
    body.append(text(left, bottom + 68, "two seeds each; * one"))
    return svg(640, 394, body, "ResNet-18 (width 32) on CIFAR-10 at 90 % sparsity, 60 epochs: accuracy against peak")


PICTURES = {"schedule.svg": schedule, "frontier.svg": frontier}


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw())


if __name__ == "__main__":
    main()
