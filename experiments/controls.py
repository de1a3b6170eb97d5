"""What growth itself brings, and what the rise of the sparsity does: gradual_gap against its controls, in every study.

python experiments/controls.py           # the tables of docs/theory.md, from the results beside this file
python experiments/controls.py --write   # bring the page up to date
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from comparing import RESULTS
from page import put, write_or_print

from growprune.compare import of_runs
from growprune.compare.statistics import paired
from growprune.compare.table import TableRow

PAGE = Path(__file__).parent.parent / "docs" / "theory.md"
STUDIES = {
    "cifar10-width32": ("CIFAR-10, ResNet-18 of width 32", "SGD"),
    "cifar10-width64": ("CIFAR-10, ResNet-18 of width 64", "SGD"),
    "shapenet": ("ShapeNet parts, PointNet++", "Adam"),
    "bccd": ("blood cells, SSD300", "AdamW"),
    "multi30k": ("Multi30k, Transformer", "Adam"),
}
"""What their task and optimizer are called. In all of them more is better."""
EVEN, CUBIC = "gradual_gap:global", "gradual_gap:global power=3"
"""Rows that grow, as their sparsity rises."""

Rows = dict[str, TableRow]
"""Those of one sparsity, by name."""


def growth(rows: Rows) -> list[str] | None:
    """The cells of a line about growing, against never growing."""
    ours, controls = scores(rows, EVEN), [scores(rows, f"{EVEN} control={kind}") for kind in ("peak", "start")]
    return [_mean(ours), *(_difference(ours, control) for control in controls)] if ours else None


def rise(rows: Rows) -> list[str] | None:
    """The cells of a line about a cubic rise, against an even one: growing, and never growing from the same peak."""
    pairs = [(CUBIC, EVEN), (f"{CUBIC} control=peak", f"{EVEN} control=peak")]
    gaps = [_difference(scores(rows, a, split), scores(rows, b, split)) for a, b in pairs for split in SPLITS]
    return [_mean(scores(rows, EVEN)), _mean(scores(rows, CUBIC)), *gaps] if CUBIC in rows else None


def scores(rows: Rows, name: str, split: str = "test") -> dict[int, float]:
    """By seed; none if there is no such row."""
    return rows[name].values(split) if name in rows else {}


SPLITS = ("validation", "test")
TABLES = {
    "controls": (growth, ("growing", "minus never growing, equal peak", "minus never growing, equal start")),
    "rises": (
        rise,
        (
            "growing, even",
            "growing, cubic",
            "cubic minus even: growing, validation",
            "test",
            "never growing, validation",
            "test",
        ),
    ),
}
"""What makes their lines, and the heads of these, by the name of their place in the page."""


def table(name: str) -> str:
    """A line for each study and sparsity that has the rows."""
    cells, heads = TABLES[name]
    lines = ["| " + " | ".join(("task", "optimizer", "sparsity", *heads)) + " |"]
    lines += ["|---|---|" + "---:|" * (1 + len(heads))]
    for study, names in STUDIES.items():
        for sparsity, rows in _by_sparsity(study):
            if found := cells(rows):
                lines.append("| " + " | ".join((*names, f"{sparsity:g}", *found)) + " |")
    return "\n".join(lines) + "\n"


def _by_sparsity(study: str) -> Iterator[tuple[float, Rows]]:
    rows = of_runs([RESULTS / study]).rows
    for sparsity in sorted({row.sparsity for row in rows if row.sparsity}):
        yield sparsity, {row.name: row for row in rows if row.sparsity == sparsity}


def _mean(values: dict[int, float]) -> str:
    return f"{sum(values.values()) / len(values):.2f}"


def _difference(ours: dict[int, float], theirs: dict[int, float]) -> str:
    gap = paired(ours, theirs)
    if gap is None:
        return "-"
    error = "" if gap["standard_error"] is None else f" ± {gap['standard_error']:.2f}"
    return f"{gap['mean']:+.2f}{error} ({gap['count']})"


def page(text: str) -> str:
    for name in TABLES:
        text = put(text, f"<!-- {name} -->\n", f"<!-- end of {name} -->", table(name))
    return text


if __name__ == "__main__":
    write_or_print(__doc__, PAGE, page, "\n".join(table(name) for name in TABLES))
