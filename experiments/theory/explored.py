"""Which share of a model's weights has ever lived, as training goes on? Six methods on the digits CNN at 90 %.

python experiments/theory/explored.py
"""

from __future__ import annotations

from math import prod

import digits
from common import Trace, clock, keep, parser, run, table, told

import growprune as gp
from growprune.plan import Action

METHODS = ("cyclic_gap", "random_gap", "set", "rigl", "static_random", "gmp")
WHEN = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 1.0)


def expected_set(plan: gp.Plan, num_weights: int, num_live: int) -> float:
    """The share of one layer's weights that SET is expected to have seen at the end of its plan.

    A swap drops k live weights and lets k random ones live out of all that are dead then. A weight that was never seen
    is among these with probability k / dead, whatever was dropped; so training does not matter here.
    """
    shares = [edit.share for phase in plan for edit in phase.edits if edit.action is Action.PRUNE and edit.share]
    dropped = [int(share * num_live) for share in shares]
    num_dead = num_weights - num_live
    return 1 - num_dead / num_weights * prod(1 - k / (num_dead + k) for k in dropped)


def explore(name: str, epochs: int, width: int, seed: int) -> tuple[Trace, dict[str, float]]:
    def plan(S: gp.Partition) -> gp.Plan:
        return digits.METHODS[name](S, 0.9, epochs, seed)

    return run(gp.tasks.Digits(width=width), plan, digits.SGD, sparsity=0.9, seed=seed)


def main() -> None:
    options = parser(__doc__ or "", "explored")
    options.add_argument("--epochs", type=int, default=40)
    options.add_argument("--width", type=int, default=16)
    arguments, seconds = options.parse_args(), clock()
    rows, figures = [], []
    for name in METHODS:
        runs = [explore(name, arguments.epochs, arguments.width, seed) for seed in range(arguments.seeds)]
        curves = [[trace.coverage_at(round(when * trace.iterations)) for when in WHEN] for trace, _ in runs]
        means = [sum(column) / len(column) for column in zip(*curves, strict=True)]
        accuracies = [metrics["accuracy"] for _, metrics in runs]
        rows.append([f"`{name}`", *(f"{mean:.3f}" for mean in means), f"{runs[0][0].peak:.2f}", told(accuracies)])
        figures.append({"method": name, "coverage": curves, "accuracy": accuracies, "peak": runs[0][0].peak})
    print(table(["ever live after", *(f"{when:.0%}" for when in WHEN), "peak live", "test accuracy"], rows))
    keep(arguments.out, seconds(), when=WHEN, epochs=arguments.epochs, width=arguments.width, rows=figures)


if __name__ == "__main__":
    main()
