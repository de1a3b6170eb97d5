"""Does quality follow the average number of live weights over training? Digits, nine methods and dense.

The results of real runs that are kept in experiments/ are shown in the same way.

python experiments/theory/live_weights.py
"""

from __future__ import annotations

import statistics
from typing import Any

import digits
from common import HERE, clock, keep, mean_and_error, parser, run, table, told

import growprune as gp
from growprune.runs import Record, find_runs

METRICS = {"classification-cifar10": "top1", "classification-cifar10-width32": "top1"}


def measure(name: str, sparsity: float, seed: int, epochs: int, width: int) -> dict[str, float]:
    """One run: the average and the peak share of live weights, and the test metrics."""

    def plan(S: gp.Partition) -> gp.Plan:
        return digits.METHODS[name](S, sparsity, epochs, seed)

    settings = {"sparsity": 0.0 if name == "dense" else sparsity, "seed": seed}
    trace, metrics = run(gp.tasks.Digits(width=width), plan, digits.SGD, **settings)
    return {"average": trace.average, "peak": trace.peak, **metrics}


def rank_correlation(x: list[float], y: list[float]) -> float:
    """Spearman's: 1 if one rises whenever the other does. Equal values have the mean of their ranks."""
    return statistics.correlation(_ranks(x), _ranks(y))


def _ranks(values: list[float]) -> list[float]:
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


def kept() -> list[dict[str, Any]]:
    """Runs on CIFAR-10: what of each is known, by study and row, averaged over seeds."""
    rows = []
    for study, metric in METRICS.items():
        by_row: dict[str, list[Record]] = {}
        for found in find_runs([HERE.parent / study]):
            by_row.setdefault(found.path.parent.name, []).append(found)
        for row, runs in by_row.items():
            scores = [each.figure("test")[metric] for each in runs]
            place = {"study": study, "row": row, "seeds": len(runs)}
            rows.append({**place, "average": statistics.mean(map(average_live, runs)), metric: statistics.mean(scores)})
    return rows


def average_live(record: Record) -> float:
    """The mean share of live weights over the epochs of a kept run."""
    return statistics.mean(row["alive"] for row in record.history) / record.total("prunable")


def main() -> None:
    options = parser(__doc__ or "", "live_weights")
    options.add_argument("--epochs", type=int, default=40)
    options.add_argument("--width", type=int, default=8)
    options.add_argument("--sparsities", type=float, nargs="+", default=[0.9, 0.95])
    arguments, seconds = options.parse_args(), clock()
    rows, figures, correlations = [], [], {}
    for sparsity in arguments.sparsities:
        for name in digits.METHODS:
            runs = [measure(name, sparsity, n, arguments.epochs, arguments.width) for n in range(arguments.seeds)]
            figures.append({"sparsity": sparsity, "method": name, "runs": runs})
        here = sorted(figures[-len(digits.METHODS) :], key=lambda row: row["runs"][0]["average"])
        for row in here:
            average, peak = (mean_and_error([one[key] for one in row["runs"]])[0] for key in ("average", "peak"))
            scores = [[one[key] for one in row["runs"]] for key in ("accuracy", "loss")]
            cells = [f"{average:.2f}", f"{peak:.2f}", told(scores[0]), told(scores[1], 3)]
            rows.append([f"{sparsity:.0%} `{row['method']}`", *cells])
        sparse = [row for row in here if row["method"] != "dense"]
        columns = [
            [statistics.mean(one[key] for one in row["runs"]) for row in sparse] for key in ("average", "accuracy")
        ]
        correlations[f"{sparsity:.0%}"] = rank_correlation(*columns)
    print(table(["", "average live", "peak live", "test accuracy", "test loss"], rows))
    print("\nRank correlation of average live and accuracy, dense left out:", correlations, "\n")
    cifar = kept()
    print(
        table(
            ["", "seeds", "average live", "top1"],
            [[f"{r['study']}/{r['row']}", r["seeds"], f"{r['average']:.2f}", f"{r['top1']:.2f}"] for r in cifar],
        )
    )
    keep(arguments.out, seconds(), correlations=correlations, rows=figures, cifar10=cifar)


if __name__ == "__main__":
    main()
