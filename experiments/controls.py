"""What growth itself brings, what the rise of the sparsity does, and which learning rates suit sparse layers.

python experiments/controls.py           # print tables of docs/, made from the results beside this file
python experiments/controls.py --write   # bring the pages up to date
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from comparing import RESULTS
from page import filled, markdown, write_or_print

from growprune.compare import of_runs
from growprune.runs import RunRow, find_runs
from growprune.runs.table import paired

PAGE = Path(__file__).parent.parent / "docs" / "theory.md"
SHAKESPEARE = PAGE.parent / "results" / "shakespeare.md"
STUDIES = {
    "cifar10-width32": "CIFAR-10, half the width",
    "cifar10-width64": "CIFAR-10, full width",
    "shapenet": "ShapeNet",
    "bccd": "blood cells",
    "multi30k": "Multi30k",
}
"""What their tasks are called. In all of them more is better."""
EVEN, CUBIC = "gradual_gap:global", "gradual_gap:global power=3"
"""Rows that grow, as their sparsity rises."""

Rows = dict[str, RunRow]
"""Those of one sparsity, by name."""


def scores(rows: Rows, name: str) -> dict[int, float]:
    """On test data, by seed; none if there is no such row."""
    return rows[name].values("test") if name in rows else {}


PAIRS = {
    "growth, equal peak": (EVEN, f"{EVEN} control=peak"),
    "growth, equal start": (EVEN, f"{EVEN} control=start"),
    "cubic, growing": (CUBIC, EVEN),
    "cubic, never growing": (f"{CUBIC} control=peak", f"{EVEN} control=peak"),
}
"""Which row is compared with which, by column."""


def table() -> str:
    """A line for each study and sparsity."""
    lines = []
    for study, name in STUDIES.items():
        for sparsity, rows in _by_sparsity(study):
            gaps = [_difference(scores(rows, ours), scores(rows, theirs)) for ours, theirs in PAIRS.values()]
            lines.append([name, f"{100 * sparsity:g} %", *gaps])
    return markdown(["task", "sparsity", *PAIRS], lines)


def _by_sparsity(study: str) -> Iterator[tuple[float, Rows]]:
    rows = of_runs([RESULTS / study]).rows
    for sparsity in sorted({row.sparsity for row in rows if row.sparsity}):
        yield sparsity, {row.name: row for row in rows if row.sparsity == sparsity}


def _difference(ours: dict[int, float], theirs: dict[int, float]) -> str:
    gap = paired(ours, theirs)
    if gap is None:
        return "-"
    error = "" if gap.standard_error is None else f" ± {gap.standard_error:.2f}"
    return f"{gap.mean:+.2f}{error} ({gap.count})"


TUNED = "shakespeare-small"
"""A study whose rows were all tuned over learning rates and lr_scaling, under AdamW."""
TUNED_SGD = "cifar10-small"
"""The same, under SGD."""


def rates(study: str, decimals: int) -> str:
    """Validation scores of one seed: a line for each tuned row that is sparse, a column for each point of the grid."""
    lines, heads = [], [""]
    for file in sorted((RESULTS / study).rglob("tuning.json")):
        tuning = json.loads(file.read_text())
        if len(tuning["points"]) == tuning["size"]:  # lr_scaling does nothing to a dense model
            heads = [point["name"].replace("optimizer.", "") for point in tuning["points"]]
            lines.append([tuning["row"], *(f"{point['validation']:.{decimals}f}" for point in tuning["points"])])
    return markdown(["row", *heads], lines)


def choices() -> str:
    """Validation scores of gradual_gap with other settings, by seed: a line for each setting, the default first."""
    default = "gradual_gap-global/0.9/optimizer.lr=0.004-lr_scaling=1"
    others = sorted(path for path in (RESULTS / "shakespeare-choices").iterdir() if path.is_dir())
    folders = {"default: lr_scaling=1, until=0.75, begin=0": RESULTS / TUNED / default} | {p.name: p for p in others}
    lines = [[name, *(f"{_validation(folder / seed):.3f}" for seed in SEEDS)] for name, folder in folders.items()]
    return markdown(["gradual_gap, 90 %", *SEEDS], lines)


SEEDS = ("seed0", "seed1")


def _validation(folder: Path) -> float:
    (run,) = find_runs([folder])
    return float(run.figure("validation")["bits_per_byte"])


def files() -> dict[Path, str]:
    """What the pages must hold."""
    pages = {
        PAGE: {"controls": table(), "lr_scaling": rates(TUNED, 3), "lr_scaling_sgd": rates(TUNED_SGD, 1)},
        SHAKESPEARE: {"choices": choices()},
    }
    return {page: filled(page, tables) for page, tables in pages.items()}


if __name__ == "__main__":
    write_or_print(__doc__, files())
