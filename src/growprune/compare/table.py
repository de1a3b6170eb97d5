"""The table of a comparison: rows with the numbers of each seed, and a summary.

`comparison.json` has everything (its fields are in docs/comparing.md), `comparison.csv` and `comparison.md` the rows.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from growprune.compare.jobs import writing_to
from growprune.compare.statistics import best_baseline, paired, spread
from growprune.engine.metric import Metric, decimals, in_full, mean
from growprune.errors import GrowpruneError
from growprune.files.atomic import replacing
from growprune.files.json_file import finite
from growprune.runs.comparable import TOLERANCE
from growprune.runs.record import DENSE, Record, say_small
from growprune.runs.tuned import HEAD as TUNING_HEAD
from growprune.runs.tuned import cells_of, errors_of, notes_of

FORMAT = 1
"""Format version of comparison.json."""
SHARES = ("training_flops", "inference_flops", "peak_alive", "average_alive")
QUALITY = ("row", "sparsity", "epochs", "test", "vs baseline", "vs dense", "runs")
COST = ("training FLOPs", "inference FLOPs", "peak alive", "average alive", "memory", "seconds")
"""Columns for the quality and the cost of a row."""


@dataclass
class TableRow:
    name: str
    method: str
    allocation: str
    options: Mapping[str, Any]
    sparsity: float
    """The target sparsity."""
    epochs: float | None
    runs: list[dict[str, Any]]
    summary: dict[str, Any] = field(default_factory=dict)
    small: dict[str, Any] | None = None
    """For a small dense model, the sparse model that it equals."""
    tuning: dict[str, Any] | None = None
    """How the row was tuned, as in `tuning.json`."""

    @property
    def is_dense(self) -> bool:
        return self.method == DENSE

    @property
    def has_sparsity(self) -> bool:
        """True if the row has a target sparsity. The dense baseline has none; before a run starts it is unknown."""
        return bool(self.method) and not self.is_dense

    @property
    def is_off(self) -> bool:
        """True if it ends at another sparsity than its target. Always False for a small dense model."""
        if self.small:
            return False
        reached = self.summary["reached"]
        return reached is not None and abs(reached - self.sparsity) > TOLERANCE

    def values(self, figure: str) -> dict[int, float]:
        """A number of each run by seed, for runs that have it."""
        return {run["seed"]: run[figure] for run in self.runs if run.get(figure) is not None}

    def quality_cells(self) -> dict[str, str]:
        """The cells of the quality columns."""
        sparsity = in_full(self.sparsity) + (f" (reached {_reached(self)})" if self.is_off else "")
        sparsity += f" ({say_small(self.small)})" if self.small else ""
        epochs = "-" if self.epochs is None else f"{self.epochs:g}"
        test = _mean_and(self.summary["test"], "deviation", _places(self))
        rest = [test, _gap(self, "minus_baseline"), _gap(self, "minus_dense"), _runs(self)]
        return dict(zip(QUALITY, [self.name, sparsity, epochs, *rest], strict=True))

    def cost_cells(self) -> dict[str, str]:
        """The cells of the cost columns."""
        shares = ["-" if self.summary[name] is None else f"{self.summary[name]:.3f}" for name in SHARES]
        peak, seconds = self.summary["peak_bytes"], self.summary["seconds"]
        memory = "-" if peak is None else f"{peak / 2**20:.0f} MiB"
        return dict(zip(COST, [*shares, memory, "-" if seconds is None else f"{seconds:.1f}"], strict=True))


@dataclass
class Comparison:
    base: str
    """The recipe. Empty for existing runs."""
    budget: Mapping[str, Any]
    """kind, epochs and max_epochs. Empty for existing runs."""
    metric: str
    lower_is_better: bool
    """True if a lower metric is better. Differences keep their sign either way."""
    notes: list[str]
    """Notes for the reader: differences between rows, and rows at the epoch limit."""
    rows: list[TableRow]

    @property
    def terms(self) -> str:
        """Recipe, sparsity and epochs, as far as all rows share them."""
        sparsities = {row.sparsity for row in self.rows if row.has_sparsity}
        epochs = {row.epochs for row in self.rows}
        words = [f" on {self.base}"] if self.base else []
        words += [f" at sparsity {in_full(sparsity)}" for sparsity in sparsities if len(sparsities) == 1]
        words += [f", {each:g} epochs" for each in epochs if each is not None and len(epochs) == 1]
        return "".join(words)

    @property
    def errors(self) -> list[str]:
        """One line for each failed run, including tuning runs."""
        rows = [row for row in self.rows if not row.tuning or row.tuning["chosen"]]
        failed = [(row, run) for row in rows for run in row.runs if run["status"] == "failed"]
        said = [line for tuning in self.tunings for line in errors_of(tuning)]
        for row, run in failed:
            said.append(f"{row.name} {in_full(row.sparsity)} seed {run['seed']} failed: {run['error']}")
        return said

    @property
    def tunings(self) -> list[dict[str, Any]]:
        """How each row was tuned. Empty without tuning."""
        return [row.tuning for row in self.rows if row.tuning]

    def to_dict(self) -> dict[str, Any]:
        """The content of comparison.json. nan and infinity become null."""
        return {"format": FORMAT, **finite(asdict(self))}

    def write(self, folder: Path, *, with_markdown: bool = False) -> None:
        texts = {"comparison.json": json.dumps(self.to_dict(), indent=2) + "\n", "comparison.csv": self.to_csv()}
        texts |= {"comparison.md": self.to_markdown()} if with_markdown else {}
        with writing_to(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with replacing(folder / name) as file:
                file.write(text.encode())

    def to_csv(self) -> str:
        """One line per row, with all digits."""
        text = io.StringIO()
        lines = [{"row": row.name, "sparsity": row.sparsity, "epochs": row.epochs, **_flat(row)} for row in self.rows]
        writer = csv.DictWriter(text, list(lines[0]) if lines else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return text.getvalue()

    def to_markdown(self) -> str:
        heads = [*QUALITY, *COST]
        lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
        for row in self.rows:
            cells = row.quality_cells() | row.cost_cells()
            lines.append("| " + " | ".join(cells[head] for head in heads) + " |")
        if self.tunings:
            lines += ["", "| " + " | ".join(TUNING_HEAD) + " |", "|---|---|" + "---:|" * (len(TUNING_HEAD) - 2)]
            lines += ["| " + " | ".join(cells_of(tuning)) + " |" for tuning in self.tunings]
        return "\n".join([*lines, "", *(f"- {note}" for note in [*self.notes, *self.errors])]) + "\n"


def build(
    found: Sequence[Record],
    *,
    base: str = "",
    budget: Mapping[str, Any] | None = None,
    planned: Mapping[tuple[str, float], float] | None = None,
    notes: Sequence[str] = (),
) -> Comparison:
    """Build the table. `planned` has the epochs of rows without a finished run."""
    metric = _metric([run.result for run in found if run.result is not None])
    groups: dict[tuple[str, float], list[Record]] = {}
    for run in found:
        groups.setdefault((run.row, run.sparsity), []).append(run)
    dense = _reference(found, metric)
    lengths = (run.final_epochs for run in found if run.row == dense)
    reference = (budget or {}).get("epochs") or next(filter(None, lengths), None)
    rows = []
    for (name, sparsity), group in groups.items():
        trained = (run.final_epochs for run in group if run.is_finished)
        epochs = next(trained, (planned or {}).get((name, sparsity)))
        runs = [_figures(run, metric.name, reference) for run in group]
        rows.append(_row(name, group[0], epochs, runs))
    _sum_up(rows, metric, next((row for row in rows if row.name == dense), None))
    lower = [f"a lower {metric.name} is better"] if metric.lower_is_better else []
    several = sum(row.is_dense for row in rows) > 1
    which = [f"vs dense compares with {dense}, the best dense row by validation"] if dense and several else []
    tunings = [row.tuning for row in rows if row.tuning]
    said = [*lower, *notes, *which, *_notes(found, rows), *notes_of(tunings)]
    return Comparison(base, budget or {}, metric.name, metric.lower_is_better, said, rows)


def _row(name: str, run: Record, epochs: float | None, runs: list[dict[str, Any]]) -> TableRow:
    """A row of runs that differ only by seed. `run` is one of them."""
    method = run.method if run.small else str(run.recipe.get("method", ""))
    options, allocation = run.recipe.get("options") or {}, str(run.recipe.get("allocation", ""))
    made = TableRow(name, method, allocation, options, run.sparsity, epochs, runs)
    made.small, made.tuning = run.small or None, run.tuning or None
    return made


def _metric(results: Sequence[Mapping[str, Any]]) -> Metric:
    """The metric of all results."""
    metric = Metric.of(results[0]) if results else Metric("")
    if not all(metric.name in result[split] for result in results for split in ("validation", "test")):
        raise GrowpruneError(f"not all results have the metric {metric.name!r}. Compare runs of one task only")
    return metric


def _reference(runs: Sequence[Record], metric: Metric) -> str | None:
    """Name of the dense row that others are compared with. If there are several, the best by validation."""
    scores: dict[str, list[float]] = {}
    for run in runs:
        if run.is_dense and run.result is not None:
            scores.setdefault(run.row, []).append(run.result["validation"][metric.name])
    means = {row: score for row, values in scores.items() if (score := mean(values)) is not None}
    return metric.best(means) or next(iter(scores), None)


def _figures(record: Record, metric: str, reference: float | None) -> dict[str, Any]:
    run: dict[str, Any] = {"seed": record.seed, "folder": str(record.folder), "status": record.status}
    run |= {"error": record.why if record.status == "failed" else ""}
    if (result := record.result) is None:
        return run
    totals, small = result["sparsity"]["totals"], record.small  # shares are of the full model
    prunable, epochs = record.num_prunable, record.epochs
    flops = totals.get("flops_dense") and totals["flops_dense"] / small.get("flops", 1)
    dense = 0.0
    if result.get("training_examples") and flops and epochs:
        dense = 3 * flops * result["training_examples"] * (reference or epochs) / epochs
    return run | {
        "validation": result["validation"][metric],
        "test": result["test"][metric],
        "epochs": epochs,
        "reached": 1 - totals["alive"] / prunable if prunable else 0.0,
        "training_flops": _share(result.get("training_flops"), dense),
        "inference_flops": _share(totals.get("flops_sparse"), flops),
        "peak_alive": _share(result.get("peak_alive"), prunable),
        "average_alive": _share(result.get("average_alive"), prunable),
        "peak_bytes": result["peak_bytes"],
        "seconds": result["seconds"],
    }


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _sum_up(rows: Sequence[TableRow], metric: Metric, dense: TableRow | None) -> None:
    validation = [row.values("validation") for row in rows]
    for row in rows:
        row.summary["reached"] = _mean(row, "reached")
    for index, row in enumerate(rows):
        baseline = None if row.is_dense else best_baseline(index, validation, _baselines(row, rows), metric)
        test = row.values("test")
        row.summary["test"], row.summary["validation"] = (spread([*v.values()]) for v in (test, validation[index]))
        row.summary["baseline"] = None if baseline is None else rows[baseline].name
        row.summary["minus_baseline"] = None if baseline is None else paired(test, rows[baseline].values("test"))
        row.summary["minus_dense"] = None if dense in (None, row) else paired(test, dense.values("test"))
        row.summary |= {name: _mean(row, name) for name in (*SHARES, "seconds")}
        row.summary["peak_bytes"] = max(row.values("peak_bytes").values(), default=None)
        states = [run["status"] for run in row.runs]
        row.summary |= {status: states.count(status) for status in ("finished", "failed", "unfinished")}


def _baselines(row: TableRow, rows: Sequence[TableRow]) -> list[int]:
    """The baselines of a row: other methods at its sparsity that reach it.

    Methods that miss it count only if all do. The same method with other options, such as controls, counts only if
    there is no other.
    """
    alike = [i for i, other in enumerate(rows) if other.sparsity == row.sparsity]
    sparse = [i for i in alike if not rows[i].is_dense and not rows[i].small]
    fair = [i for i in sparse if not rows[i].is_off] or sparse
    return [i for i in fair if rows[i].method != row.method] or fair


def _mean(row: TableRow, figure: str) -> float | None:
    return mean(row.values(figure).values())


def _notes(runs: Sequence[Record], rows: Sequence[TableRow]) -> list[str]:
    places = {str(run.result["environment"].get("device")) for run in runs if run.result is not None}
    notes = [f"runs used different devices ({', '.join(sorted(places))}): do not compare seconds"]
    notes = notes if len(places) > 1 else []
    off = [row for row in rows if row.is_off]
    for sparsity in dict.fromkeys(row.sparsity for row in rows if row.summary["baseline"]):
        notes.append(_say_baselines([row for row in rows if row.sparsity == sparsity and row.summary["baseline"]]))
    small = [f"{row.name} {in_full(row.sparsity)}: {say_small(row.small, at_length=True)}" for row in rows if row.small]
    notes += small
    return [*notes, *(f"{row.name} missed sparsity {in_full(row.sparsity)}: it reached {_reached(row)}" for row in off)]


def _say_baselines(rows: Sequence[TableRow]) -> str:
    """Name the best baseline. It is the same for all rows except those of its own method or with missing seeds."""
    by_baseline: dict[str, list[str]] = {}
    for row in rows:
        by_baseline.setdefault(row.summary["baseline"], []).append(row.name)
    (usual, _), *others = sorted(by_baseline.items(), key=lambda item: -len(item[1]))
    exceptions = "".join(f"; for {', '.join(names)} it is {baseline}" for baseline, names in others)
    return f"best baseline at {in_full(rows[0].sparsity)}, by validation: {usual}{exceptions}"


# What is shown


def _reached(row: TableRow) -> str:
    return f"{row.summary['reached']:.4g}"


def _gap(row: TableRow, name: str) -> str:
    gap = row.summary[name]
    return "" if gap is None else _mean_and(gap, "standard_error", _places(row), "+")


def _places(row: TableRow) -> int:
    return decimals(row.summary["test"]["mean"])


def _mean_and(numbers: Mapping[str, Any], spread: str, places: int, sign: str = "") -> str:
    if numbers["mean"] is None or math.isnan(numbers["mean"]):
        return "-" if numbers["mean"] is None else "nan"
    more = "" if numbers[spread] is None else f" ± {numbers[spread]:.{places}f}"
    return f"{numbers['mean']:{sign}.{places}f}" + more


def _runs(row: TableRow) -> str:
    counts = {status: row.summary[status] for status in ("failed", "unfinished")}
    return ", ".join([str(row.summary["finished"]), *(f"{n} {status}" for status, n in counts.items() if n)])


def _flat(row: TableRow) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    spreads = {"test": "deviation", "validation": "deviation"}
    spreads |= {"minus_baseline": "standard_error", "minus_dense": "standard_error"}
    for name, more in spreads.items():
        numbers = row.summary[name] or {}
        flat |= {f"{name}_mean": numbers.get("mean"), f"{name}_{more}": numbers.get(more)}
    flat |= {name: value for name, value in row.summary.items() if name not in spreads}
    tuning = row.tuning or {"chosen": None, "size": None, "points": []}
    return flat | {"chosen": tuning["chosen"], "grid": tuning["size"], "tuning_runs": len(tuning["points"])}
