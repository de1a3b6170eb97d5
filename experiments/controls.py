"""What growth itself brings: gradual_gap against its two controls, which never grow, in every study that has them.

python experiments/controls.py           # the table of docs/theory.md, from the results beside this file
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
RISES = {"gradual_gap:global": "cubic", "gradual_gap:global power=1": "even"}
"""Rows that grow, and how their sparsity rises."""
HEADS = (
    "task",
    "optimizer",
    "sparsity",
    "rise",
    "growing",
    "minus never growing, equal peak",
    "minus never growing, equal start",
)


def table() -> str:
    """A line for each study and sparsity of which there are all three rows."""
    lines = ["| " + " | ".join(HEADS) + " |", "|---|---|" + "---:|" * (len(HEADS) - 2)]
    for study, names in STUDIES.items():
        rows = of_runs([RESULTS / study]).rows if (RESULTS / study).is_dir() else []
        lines += ["| " + " | ".join([*names, *cells]) + " |" for cells in _cells(rows)]
    return "\n".join(lines) + "\n"


def _cells(rows: list[TableRow]) -> Iterator[list[str]]:
    found = {(row.name, row.sparsity): row.values("test") for row in rows}
    for sparsity in sorted({row.sparsity for row in rows if row.sparsity}):
        for name, rise in RISES.items():
            growing = found.get((name, sparsity), {})
            controls = [found.get((f"{name} control={kind}", sparsity), {}) for kind in ("peak", "start")]
            if growing and controls[0]:
                mean = sum(growing.values()) / len(growing)
                yield [f"{sparsity:g}", rise, f"{mean:.2f}", *(_difference(growing, control) for control in controls)]


def _difference(ours: dict[int, float], theirs: dict[int, float]) -> str:
    gap = paired(ours, theirs)
    if gap is None:
        return "-"
    error = "" if gap["standard_error"] is None else f" ± {gap['standard_error']:.2f}"
    return f"{gap['mean']:+.2f}{error} ({gap['count']})"


def page(text: str) -> str:
    return put(text, "<!-- controls -->\n", "<!-- end of controls -->", table())


if __name__ == "__main__":
    write_or_print(__doc__, PAGE, page, table())
