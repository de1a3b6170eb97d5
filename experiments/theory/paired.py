"""Arms of an experiment, each compared with the first one of the same optimizer, seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from common import table, told

DIVERGED = 10.0
"""A test loss above this is no model; guessing gives 2.3, or 4.2 for characters."""
SGD = partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=5e-4)
ADAM = partial(torch.optim.AdamW, weight_decay=0.01)

Figures = dict[str, float]
"""Of one run: "peak", "average", "loss", and "accuracy" if the task has one."""


def compare(
    rates: Mapping[str, Any], arms: Mapping[str, Any], once: Callable[[Any, Any, int], Figures], seeds: int
) -> list[dict[str, Any]]:
    """Train every arm with every optimizer and seed, print a table, and give all figures back.

    Args:
        once: given an arm, what makes the optimizer, and a seed, one run.
    """
    rows, found = [], []
    for optimizer, make in rates.items():
        base: list[Figures] = []
        for name, arm in arms.items():
            runs = [once(arm, make, seed) for seed in range(seeds)]
            base = base or runs
            rows.append([f"{optimizer}: {name}", *cells(runs, base)])
            found.append({"optimizer": optimizer, "arm": name, "runs": runs})
            print(rows[-1], flush=True)
    columns = [key for key in ("accuracy", "loss") if key in base[0]]
    heads = [head for key in columns for head in (f"test {key}", "minus the first")]
    print(table(["", "peak", "average live", *heads], rows))
    return found


def cells(runs: list[Figures], base: list[Figures]) -> list[str]:
    """Mean ± standard error; of the difference between runs of the same seed, too. What diverged is counted apart."""
    pairs = [(one, other) for one, other in zip(runs, base, strict=True) if one["loss"] < DIVERGED]
    lost = "" if len(pairs) == len(runs) else f" ({len(runs) - len(pairs)} of {len(runs)} diverged)"
    found = [f"{sum(one[key] for one in runs) / len(runs):.2f}" for key in ("peak", "average")]
    for key, digits in (("accuracy", 2), ("loss", 3)):
        if key in runs[0] and pairs:
            gaps = [one[key] - other[key] for one, other in pairs]
            found.append(told([one[key] for one, _ in pairs], digits) + lost)
            found.append("" if runs is base else told(gaps, digits, sign=True))
    return found
