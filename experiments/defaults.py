"""How the defaults of `gradual_gap` were chosen: the tables of docs/theory.md, section 9, from suite/defaults.jsonl.

    python experiments/defaults.py            # print them
    python experiments/defaults.py --write    # write them into the page

The first line of the file says how and where its runs were made; each other line is a run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RUNS = HERE / "suite" / "defaults.jsonl"
PAGE = HERE.parent / "docs" / "theory.md"
METRICS = {"shakespeare": "bits_per_byte", "cifar10": "top1", "multi30k": "loss", "shapenet": "instance_miou"}

FAILURES = {
    "GMP": "gmp",
    "never growing": "never60",
    "the same, `lr_ramp=0.3`": "never60 ramp=0.3",
    "the same, `rescale=True`": "never60 rescale",
    "the same, warm-up of 150 iterations": "never60 warmup=150",
    "the same, `lr_scaling=0.5`": "never60 lr_scaling=0.5",
    "the same, rates relative to those at the start": "never60 relative",
    "the same, factor at most 5": "never60 cap=5",
    "growing until 0.3": "early3",
    "growing until 0.75": "g75",
    "first edition": "first",
}
"""Runs on Shakespeare at a rate of 0.0057, clipped at a norm of 1, with 50 iterations of warm-up."""
GROWTH = {
    "GMP": ("gmp", "gmp ramp.3 w150", "gmp ramp.3 e3", "gmp"),
    "never growing": ("never60", "never60 r ramp.3 w150", "never60 ramp.3 e3", "never60 ramp.3"),
    "growing until 0.3": ("early3", "early3 r ramp.3 w150", "early3 ramp.3 e3", "early3 ramp.3"),
    "the same, longer steps": ("early3 every=153", "early3 r ramp.3 w150 every=98", "early3 ramp.3 e3 every=71", ""),
    "growing until 0.5": ("g5", "", "", ""),
    "growing until 0.75": ("g75", "g75 r ramp.3 w150", "g75 ramp.3 e3", "g75 ramp.3"),
    "first edition": ("first", "", "", "first"),
}
"""Names of runs on CIFAR-10 at 0.4, Shakespeare at 0.0113, Multi30k at 0.016 and ShapeNet at 0.004."""
PLACES = (("cifar10", "0.4"), ("shakespeare", "0.0113"), ("multi30k", "0.016"), ("shapenet", "0.004"))
OPERATIONS = {
    "growing until 0.75": ("g75", "0"),
    "the same, `cost_power=0.1`": ("g75", "0.1"),
    "the same, `cost_power=0.2`": ("g75", "0.2"),
    "the same, `cost_power=0.3`": ("g75", "0.3"),
    "growing until 0.3": ("early3", "0"),
    "GMP": ("gmp", "0"),
    "the same, `cost_power=-0.15`": ("gmp", "-0.15"),
    "the same, `cost_power=-0.3`": ("gmp", "-0.3"),
    "never growing": ("never60", "0"),
    "the same, `cost_power=-0.3` ": ("never60", "-0.3"),
}
"""Runs on CIFAR-10 at 0.4: name and cost power."""


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RUNS.read_text().splitlines()[1:]]


def pick(runs: list[dict[str, Any]], cell: str, name: str, lr: str, **settings: str) -> list[dict[str, Any]]:
    """The runs of a name and a rate with these settings (`clip` 1 means none too), by seed."""
    wanted = {"optimizer.lr": lr, "cost_power": "0", **settings}
    usual = {"cost_power": "0", "clip": "1"}
    found = [
        run
        for run in runs
        if (run["cell"], run["name"]) == (cell, name)
        and all(run["settings"].get(key, usual.get(key)) == value for key, value in wanted.items())
    ]
    return sorted(found, key=lambda run: int(run["seed"]))


def scores(runs: list[dict[str, Any]], split: str = "validation") -> list[float]:
    return [run[split][METRICS[run["cell"]]] for run in runs]


def failures(runs: list[dict[str, Any]]) -> str:
    lines = ["| plan | seed 0 | seed 1 | seed 2 |", "|---|---:|---:|---:|"]
    for label, name in FAILURES.items():
        found = scores(pick(runs, "shakespeare", name, "0.0057", clip="1"))
        lines.append(f"| {label} | " + " | ".join(f"{value:.3f}" for value in found) + " |")
    return "\n".join(lines)


def growth(runs: list[dict[str, Any]]) -> str:
    lines = [
        "| plan | CIFAR-10, top-1 | Shakespeare, bits | Multi30k, nats | ShapeNet, mIoU |",
        "|---|---:|---:|---:|---:|",
    ]
    for label, names in GROWTH.items():
        cells = []
        for (cell, lr), name in zip(PLACES, names, strict=True):
            found = scores(pick(runs, cell, name, lr, clip="1")) if name else []
            cells.append(spread(found, 3 if cell in ("shakespeare", "multi30k") else 1))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: list[float], places: int) -> str:
    """Mean and standard error, and how many seeds."""
    if not values:
        return ""
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.{places}f} ± {error:.{places}f} ({len(values)})"


def operations(runs: list[dict[str, Any]]) -> str:
    lines = ["| plan | operations | validation | test | peak |", "|---|---:|---:|---:|---:|"]
    for label, (name, power) in OPERATIONS.items():
        found = pick(runs, "cifar10", name, "0.4", cost_power=power)
        share, peak = (statistics.mean(run[key] for run in found) for key in ("operations", "peak"))
        cells = [f"{share:.2f}", spread(scores(found), 1), spread(scores(found, "test"), 1), f"{peak:.2f}"]
        lines.append(f"| {label.strip()} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page() -> str:
    """The page with its tables."""
    text, runs = PAGE.read_text(), read()
    for make in (failures, growth, operations):
        begin, end = f"<!-- {make.__name__} -->\n", f"<!-- end of {make.__name__} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}{make(runs)}\n{end}{after}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print("\n\n".join(make(read()) for make in (failures, growth, operations)))


if __name__ == "__main__":
    main()
