"""The tables and pictures of the laptop suite, from suite/results.jsonl.

python experiments/suite_pages.py            # print the tables
python experiments/suite_pages.py --write    # bring pages and pictures up to date
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pictures import BLUE, GREEN, GREY, IMAGES, RED, svg
from pictures import text as letters
from suite import CELLS, RESULTS, ROOT, Cell, Row, Run, read_lines, tuned
from tables import DOCS, filled, markdown

from growprune.errors import GrowpruneError

PAGE = DOCS / "results" / "laptop.md"
README = ROOT / "README.md"
OURS, NEVER = "gradual_gap", "never growing"
LOWER = ("loss", "bits_per_byte")
"""Metrics of which less is better."""
Line = Mapping[str, Any]


@dataclass(frozen=True)
class Metric:
    """What a table shows of a score."""

    name: str
    label: str
    places: int
    factor: float = 1.0

    @property
    def sign(self) -> int:
        return -1 if self.name in LOWER else 1

    def of(self, line: Line, split: str = "test") -> float:
        value = line[split].get(self.name) if line["status"] == "finished" else None
        return math.nan if value is None else value * self.factor


METRICS = {
    "bits_per_byte": Metric("bits_per_byte", "bits per byte", 3),
    "top1": Metric("top1", "top-1", 2),
    "loss": Metric("loss", "bits per token", 3, 1 / math.log(2)),
    "instance_miou": Metric("instance_miou", "mIoU", 2),
    "accuracy": Metric("accuracy", "accuracy", 2),
}
SECOND = {"loss": Metric("bleu", "BLEU", 1)}
"""A metric that is shown beside the first."""


@dataclass(frozen=True)
class Found:
    """A row of a cell with its results, by seed."""

    cell: Cell
    row: Row
    lines: Mapping[int, Line]

    def scores(self, metric: Metric) -> dict[int, float]:
        """The finite test scores."""
        values = {seed: metric.of(line) for seed, line in self.lines.items()}
        return {seed: value for seed, value in values.items() if math.isfinite(value)}

    def mean(self, figure: str) -> float | None:
        values = [line[figure] for line in self.lines.values() if line.get(figure) is not None]
        return statistics.mean(values) if values else None

    @property
    def failed(self) -> list[int]:
        """Seeds that broke off, or are far behind the best seed of the row in validation."""
        metric = Metric(self.cell.metric, "", 0)
        found = {seed: metric.sign * metric.of(line, "validation") for seed, line in self.lines.items()}
        best = max((value for value in found.values() if math.isfinite(value)), default=0.0)
        return [seed for seed, value in found.items() if not value >= best - self.cell.failed_by]


def find(cell: Cell, lines: Sequence[Line]) -> list[Found]:
    """The rows of a cell that have results. Raise if some are of other settings or other data."""
    rows, wrong = [], []
    data: dict[int, tuple[str, Any]] = {}
    for row in cell.rows:
        found = {}
        for line in lines:
            run = Run.of(cell, row, line["seed"])
            if line["asked"] == run.asked:
                found[run.seed] = line
            elif (line["cell"], line["row"]) == (cell.name, row.name):
                wrong.append(f"{run.name} has {_difference(line['asked'], run.asked)}")
        for seed, line in found.items():
            known = data.setdefault(seed, (row.name, line.get("data")))
            if line["status"] == "finished" and line["data"] != known[1]:
                wrong.append(f"{row.name} and {known[0]} have other data with seed {seed}")
        if found:
            rows.append(Found(cell, row, dict(sorted(found.items()))))
    if wrong:
        raise GrowpruneError(
            f"the runs of {cell.name} disagree: {'; '.join(wrong)}. Remove these lines from {RESULTS.name}"
        )
    return rows


def _difference(stored: Line, asked: Line) -> str:
    return ", ".join(
        f"{key} {stored.get(key)!r} instead of {asked[key]!r}" for key in asked if stored.get(key) != asked[key]
    )


# Numbers


def spread(values: Sequence[float], places: int, sign: str = "") -> str:
    """Mean ± standard error, with one value no error."""
    if not values:
        return "-"
    said = f"{statistics.mean(values):{sign}.{places}f}"
    return said + (f" ± {standard_error(values):.{places}f}" if len(values) > 1 else "")


def standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def ahead(one: Found, other: Found, metric: Metric) -> list[float]:
    """By how much one row is better than another, seed by seed."""
    ours, theirs = one.scores(metric), other.scores(metric)
    return [metric.sign * (ours[seed] - theirs[seed]) for seed in ours if seed in theirs]


def named(rows: Sequence[Found], name: str) -> Found | None:
    return next((found for found in rows if found.row.name == name), None)


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


# Tables


def label(cell: Cell) -> str:
    return f"{cell.title}, {100 * cell.sparsity:g} %"


def table(rows: Sequence[Found]) -> str:
    """All rows of a cell, the best first."""
    cell = rows[0].cell
    metric, ours = METRICS[cell.metric], named(rows, OURS)
    shown = [metric, *([SECOND[cell.metric]] if cell.metric in SECOND else [])]
    heads = [f"{metric.label}{' (lower is better)' if metric.sign < 0 else ''}", *(each.label for each in shown[1:])]
    heads = ["row", *heads, "gradual_gap is ahead by", "non-zeros", "operations", "peak", "average", "grown", "seeds"]

    def place(found: Found) -> float:
        scores = [*found.scores(metric).values()]
        return -metric.sign * statistics.mean(scores) if scores else math.inf

    lines = []
    for found in sorted(rows, key=place):
        cells = [spread([*found.scores(each).values()], each.places) for each in shown]
        gaps = [] if ours is None or found is ours else ahead(ours, found, metric)
        reached = found.mean("reached")
        cells += ["" if ours is None or found is ours else spread(gaps, metric.places, "+")]
        cells += [share(None if reached is None else 1 - reached)]
        cells += [share(found.mean(name)) for name in ("operations", "peak", "average", "grown")]
        seeds = f"{len(found.lines)}" + (f", {len(found.failed)} failed" if found.failed else "")
        lines.append([found.row.name, *cells, seeds])
    return markdown(heads, lines)


def notes(rows: Sequence[Found]) -> list[str]:
    """How the rows were tuned, and what made them."""
    cell, lines = rows[0].cell, [line for found in rows for line in found.lines.values()]
    how = {found.row.name: tuned(cell, found.row) for found in rows}
    plain = [name for name, found in how.items() if found is None or name.startswith("C-GaP")]
    edge = [name for name, found in how.items() if found is not None and found.at_edge and name not in plain]
    said = ["Tuned: all rows" + (f" but {'; '.join(plain)}" if plain else "") if len(plain) < len(how) else "Not tuned"]
    if edge:
        said[0] += f". The best learning rate of {'; '.join(edge)} is at the edge of the grid"
    said[0] += "."
    most = max(len(found.lines) for found in rows)
    fewer = [found.row.name for found in rows if len(found.lines) < most]
    if fewer:
        said.append(f"Fewer seeds than {most}: {'; '.join(fewer)}.")
    for key, what in (("commit", "Commits"), ("torch", "Versions of torch"), ("machine", "Machines")):
        counts: dict[str, int] = {}
        for line in lines:
            if key in line:
                counts[line[key]] = counts.get(line[key], 0) + 1
        if len(counts) > 1:
            said.append(f"{what}: {', '.join(f'{name} ({count} runs)' for name, count in counts.items())}.")
    return said


def section(rows: Sequence[Found]) -> str:
    """What the page has of a cell."""
    name = label(rows[0].cell)
    image = f"![{name}: quality, operations and live weights](../images/laptop-{rows[0].cell.name}.svg)"
    said = "".join(f"- {note}\n" for note in notes(rows))
    return f"\n### {name}\n\n{table(rows)}\n{said}\n{image}\n\n"


SHOWN = {
    "dense": "dense",
    "small dense, equal non-zeros": "small dense, non-zeros",
    "small dense, equal operations": "small dense, operations",
    "rigl": "RigL",
    "gmp": "GMP",
    NEVER: "never growing",
    OURS: "`gradual_gap`",
}
"""Rows of the table in README.md, and their headings."""


def summary(cells: Sequence[Sequence[Found]]) -> str:
    """A line a cell: the scores of the main rows, and the operations of the two best known."""
    lines = []
    for rows in cells:
        cell = rows[0].cell
        metric, values = METRICS[cell.metric], []
        for name in SHOWN:
            found = named(rows, name)
            scores = [] if found is None else [*found.scores(metric).values()]
            values.append(spread(scores, metric.places))
        costs = [
            share(None if (found := named(rows, name)) is None else found.mean("operations")) for name in ("gmp", OURS)
        ]
        arrow = " (lower is better)" if metric.sign < 0 else ""
        title, _, model = cell.title.partition(", ")
        seeds = sorted({len(found.lines) for found in rows if found.row.name in SHOWN})
        runs = f"{seeds[0]}" + (f"-{seeds[-1]}" if len(seeds) > 1 else "")
        lines.append(
            [f"{title}, {model}, {metric.label}{arrow}", f"{100 * cell.sparsity:g} %", *values, " / ".join(costs), runs]
        )
    return markdown(["task", "sparsity", *SHOWN.values(), "operations, GMP / `gradual_gap`", "seeds"], lines)


def worth(cells: Sequence[Sequence[Found]]) -> str:
    """What growth brings over never growing at equal peak."""
    lines = []
    for rows in cells:
        cell, ours = rows[0].cell, named(rows, OURS)
        metric = METRICS[cell.metric]
        for other in [found for found in rows if found.row.name.startswith(NEVER)]:
            if ours is not None and (gaps := ahead(ours, other, metric)):
                failed = f"{len(ours.failed)} / {len(other.failed)}"
                costs = f"{share(ours.mean('operations'))} / {share(other.mean('operations'))}"
                power = other.row.name.removeprefix(NEVER).strip(", ")
                name = f"{label(cell)}, {metric.label}" + (f", the other with `{power}`" if power else "")
                gap = spread(gaps, metric.places, "+")
                lines.append([name, gap, costs, share(ours.mean("grown")), failed, str(len(gaps))])
    heads = ["task", "growth brings", "operations, growing / never", "grown", "failed, growing / never", "seeds"]
    return markdown(heads, lines)


def hours(lines: Sequence[Line]) -> str:
    """CPU time that the stored runs took, by cell."""
    spent: dict[str, list[float]] = {}
    for line in lines:
        spent.setdefault(line["cell"], []).append(line["cpu_seconds"])
    rows = [[name, str(len(each)), f"{max(each):.0f}", f"{sum(each) / 3600:.2f}"] for name, each in spent.items()]
    total = sum(sum(each) for each in spent.values())
    rows.append(["all", str(len(lines)), "", f"{total / 3600:.2f}"])
    return markdown(["cell", "runs", "longest run, s of CPU", "hours of CPU"], rows)


# Pictures

COLOURS = {OURS: RED, NEVER: BLUE, "gmp": GREEN}
AXES = {"operations": "operations", "peak": "most weights alive", "average": "average weights alive"}
WIDTH, HEIGHT, GAP = 230, 220, 70
"""Of each of the three parts of a picture, and between them."""


def picture(rows: Sequence[Found]) -> str:
    """Test scores against operations, peak and average density, up is better, with standard errors and a legend."""
    cell = rows[0].cell
    metric = METRICS[cell.metric]
    points = {found.row.name: [*found.scores(metric).values()] for found in rows}
    points = {name: scores for name, scores in points.items() if scores and not name.startswith("small dense")}
    ranked = sorted(points, key=lambda name: -metric.sign * statistics.mean(points[name]))
    ends = [end for scores in points.values() for end in _ends(scores)]
    low, high = min(ends), max(ends)

    def y(value: float) -> float:
        part = (value - low) / ((high - low) or 1.0)
        return 20 + (HEIGHT - 20) * (1 - part if metric.sign > 0 else part)

    body = []
    for number, (figure, words) in enumerate(AXES.items()):
        left = 60 + number * (WIDTH + GAP)
        for tick in (low + (high - low) * k / 4 for k in range(5)):
            line = f'x1="{left}" x2="{left + WIDTH}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"'
            body.append(f'<line {line} stroke="{GREY}" stroke-opacity="0.3"/>')
            body.append(letters(left - 8, y(tick) + 4, f"{tick:.{metric.places}f}", anchor="end", size=11))
        for tick in (0, 0.5, 1):
            body.append(letters(left + WIDTH * tick, HEIGHT + 20, f"{tick:g}", anchor="middle", size=11))
        body.append(letters(left + WIDTH / 2, HEIGHT + 40, words, anchor="middle", size=13))
        for found in rows:
            name, at = found.row.name, found.mean(figure)
            if name in points and at is not None:
                rank, place = ranked.index(name) + 1, (left + WIDTH * at, y)
                body += _point(place, points[name], _colour(name), str(rank), is_left=rank % 2 == 0)
    for rank, name in enumerate(ranked, 1):
        x, height = 60 + 3 * (WIDTH + GAP) - 30, 24 + 18 * (rank - 1)
        body.append(letters(x, height, f"{rank} {name}", size=13, colour=_colour(name)))
    name = f"{label(cell)}: {metric.label}"
    body.append(letters(60, HEIGHT + 64, f"{name}, better is up; shares of dense", size=13))
    return svg(1180, max(HEIGHT + 76, 30 + 18 * len(ranked)), body, name)


def _ends(scores: Sequence[float]) -> tuple[float, float]:
    middle, error = statistics.mean(scores), standard_error(scores)
    return middle - error, middle + error


def _point(
    place: tuple[float, Callable[[float], float]], scores: Sequence[float], colour: str, words: str, *, is_left: bool
) -> list[str]:
    """A mean with its standard error, and its number in the legend."""
    (x, y), (one, other) = place, _ends(scores)
    middle = y((one + other) / 2)
    beside, anchor = (x - 7, "end") if is_left else (x + 7, "start")
    return [
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y(one):.1f}" y2="{y(other):.1f}" stroke="{colour}" stroke-width="2"/>',
        f'<circle cx="{x:.1f}" cy="{middle:.1f}" r="4" fill="{colour}"/>',
        letters(beside, middle + 4, words, anchor=anchor, size=11, colour=colour),
    ]


def _colour(name: str) -> str:
    return COLOURS.get(name.partition(", cost_power")[0], GREY)


# All files


def files() -> dict[Path, str]:
    """What each file must hold that comes from the results of the suite."""
    lines = read_lines(RESULTS)
    found = [find(cell, lines) for cell in CELLS if cell.name != "digits-90"]
    shown = [rows for rows in found if named(rows, OURS)]
    made = {IMAGES / f"laptop-{rows[0].cell.name}.svg": picture(rows) for rows in shown}
    sections = "".join(section(rows) for rows in shown)
    made[PAGE] = filled(PAGE, {"worth": worth(shown), "cells": sections})
    if "<!-- laptop -->" in README.read_text():
        made[README] = filled(README, {"laptop": summary(shown)})
    made[ROOT / "experiments" / "README.md"] = filled(ROOT / "experiments" / "README.md", {"hours": hours(lines)})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    for path, text in files().items():
        path.write_text(text) if write else print(f"{path}\n\n{text}")


if __name__ == "__main__":
    main()
