"""Short forms of comparisons, for pages: fewer columns, and one line for a method at all its sparsities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from page import markdown

from growprune.compare import Comparison
from growprune.runs import RunRow


def by_sparsity(found: Comparison) -> str:
    """A line a row, the best first; for each sparsity its score, and how far that is from dense."""
    sparsities = sorted({row.sparsity for row in found.rows if not row.is_dense})
    heads = ["row", *(head for s in sparsities for head in (f"{100 * s:g} %", "vs dense"))]
    lines = []
    for name, rows in _by_name(found).items():
        at = dict.fromkeys(sparsities, rows[0]) if rows[0].is_dense else {row.sparsity: row for row in rows}
        scores = [cell for s in sparsities for cell in (_scores(found, at[s]) if s in at else ("", ""))]
        costs = [f"{max(_mean(row, 'peak_alive') for row in rows):.2f}", _flops(rows), _runs(rows)]
        lines.append([name, *scores, *costs])
    return markdown([*heads, "peak alive", "training FLOPs", "runs"], lines)


def by_peak(found: Comparison) -> str:
    """Rows that are in no other table, by the largest share of the weights that lived."""
    rows = [row for row in found.rows if not row.is_dense and len(row.runs) == 1]
    rows.sort(key=lambda row: (round(_mean(row, "peak_alive"), 2), row.name))
    return markdown(
        ["row", "peak alive", "test", "vs dense"],
        [[row.name, f"{_mean(row, 'peak_alive'):.2f}", *_scores(found, row)] for row in rows],
    )


def by_rate(found: Comparison) -> str:
    """A line a method, a column a learning rate: test score (validation loss), over the seeds that all rates have."""
    rows: dict[str, dict[str, str]] = {}
    common = set.intersection(*(set(row.values("test")) for row in found.rows))
    for row in found.rows:
        name, _, rate = row.name.partition(" optimizer.lr=")
        runs = [run for run in row.runs if run.seed in common]
        losses = [run.figure("validation")["loss"] for run in runs]
        score = sum(run.test or 0.0 for run in runs) / len(runs)
        rows.setdefault(name, {})[rate] = f"{score:.2f} ({sum(losses) / len(losses):.3f})"
    rates = sorted(rows["dense"])
    return markdown(["row", *rates], [[name, *(cells[rate] for rate in rates)] for name, cells in rows.items()])


COLUMNS = {
    "DPF": "dpf:global",
    "GMP": "gmp:global",
    "never growing": "gradual_gap:global control=peak",
    "gradual_gap": "gradual_gap:global",
}
"""How the names of rows begin; those of `gradual_gap` have no options."""


def summary(found: Mapping[str, Comparison]) -> str:
    """A line for each task and sparsity: scores, and what `gradual_gap` is ahead of dense."""
    lines = []
    for task, comparison in found.items():
        dense = next(row for row in comparison.rows if row.is_dense)
        for sparsity in sorted({row.sparsity for row in comparison.rows if not row.is_dense}):
            rows = {_bare(row): row for row in comparison.rows if row.sparsity == sparsity}
            scores = [f"{_mean(rows[name]):.2f}" for name in COLUMNS.values()]
            gap = _scores(comparison, rows[COLUMNS["gradual_gap"]])[1]
            lines.append([task, f"{100 * sparsity:g} %", f"{_mean(dense):.2f}", *scores, gap])
    return markdown(["task", "sparsity", "dense", *COLUMNS, "gradual_gap vs dense"], lines)


def _bare(row: RunRow) -> str:
    """Without how often it edits, which depends on the length of training."""
    return " ".join(word for word in row.name.split() if not word.startswith("every="))


def _by_name(found: Comparison) -> dict[str, list[RunRow]]:
    """Dense first, then by the score at the lowest sparsity."""
    sign = 1 if found.metric.lower_is_better else -1
    rows = sorted(found.rows, key=lambda row: (row.sparsity, sign * _mean(row)))
    names: dict[str, list[RunRow]] = {}
    for row in rows:
        names.setdefault(row.name, []).append(row)
    return names


def _mean(row: RunRow, figure: str = "test") -> float:
    """The mean over seeds of a number that all rows have."""
    found = row.mean(figure)
    assert found is not None, row.name
    return found


def _scores(found: Comparison, row: RunRow) -> tuple[str, str]:
    cells = found.cells(row)
    return cells["test"], cells["vs dense"]


def _flops(rows: Sequence[RunRow]) -> str:
    return ", ".join(f"{_mean(row, 'training_flops'):.2f}" for row in rows)


def _runs(rows: Sequence[RunRow]) -> str:
    """Of each sparsity, if they differ."""
    runs = [str(len(row.runs)) for row in rows]
    return runs[0] if len(set(runs)) == 1 else ", ".join(runs)
