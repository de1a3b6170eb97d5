"""The comparisons of docs/results.md: keep what runs gave, and make the tables and the pages.

growprune compare classification-cifar10/dense --methods ... --out RUNS/cifar10-width32     # on a GPU, resumable
python experiments/comparing.py --keep RUNS      # copy every result.json of RUNS/STUDY beside this file
python experiments/comparing.py --write          # bring the tables of docs/results.md up to date
growprune report experiments/compare/cifar10-width32 -o page.html   # the page; the site has it
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from page import put
from run import keep

from growprune.compare import of_runs

HERE = Path(__file__).parent
RESULTS = HERE / "compare"
PAGE = HERE.parent / "docs" / "results.md"

BEST_PLANS = (
    "gradual_gap-global",
    "gradual_gap-global-control=peak",
    "gradual_gap-global-control=start",
    "gradual_gap-global-power=3",
    "gradual_gap-global-power=3-control=peak",
    "granet-global",
    "granet-erk",
    "dpf-global",
    "gmp-global",
    "acdc-global",
    "rigl-erk",
    "cyclic_gap-uniform",
)
"""Rows that are shown with more and fewer live weights, and those that have but one peak."""


@dataclass(frozen=True)
class Study:
    """Runs that are shown in one table."""

    name: str
    """Of the folder of its results."""
    beside: tuple[str, ...] = ()
    """What it shares with another study: folders of that one's results."""
    allow: tuple[str, ...] = ()
    """What may differ between its rows, beside methods."""

    @property
    def paths(self) -> list[Path]:
        return [path for name in (self.name, *self.beside) if (path := RESULTS / name).is_dir()]


def of_patterns(base: str) -> Study:
    """The same method with other patterns."""
    return Study(f"{base}-patterns", (f"{base}/dense", f"{base}/gradual_gap-global"), ("pattern",))


def of_peaks(base: str) -> Study:
    """Quality against the peak of live weights, at 90 %."""
    return Study(f"{base}-frontier", (f"{base}/dense", *(f"{base}/{row}/0.9" for row in BEST_PLANS)))


def of_rates(base: str, sparsity: float) -> Study:
    """Some rows with another learning rate, beside the same with that of the task."""
    rows = ("gradual_gap-global", "gradual_gap-global-control=peak", "gmp-global")
    return Study(f"{base}-lr", (f"{base}/dense", *(f"{base}/{row}/{sparsity}" for row in rows)), ("optimizer.lr",))


def of_long_runs(base: str) -> Study:
    """The paper's ratio: GaP trains four times as long as dense."""
    return Study(f"{base}-paper", (f"{base}/dense",), ("epochs",))


STUDIES = (
    Study("cifar10-width32"),
    of_peaks("cifar10-width32"),
    of_long_runs("cifar10-width32"),
    of_patterns("cifar10-width32"),
    Study("cifar10-width64"),
    Study("multi30k"),
    of_peaks("multi30k"),
    of_rates("multi30k", 0.8),
    of_long_runs("multi30k"),
    of_patterns("multi30k"),
    Study("shakespeare-patterns", allow=("pattern",)),
    Study("shapenet"),
    Study("bccd"),
)


def keep_all(runs: Path) -> None:
    """Copy results, which have all that tables and pages need, and nothing that says where they were made."""
    for study in STUDIES:
        for result in sorted((runs / study.name).rglob("result.json")):
            keep(result, RESULTS / study.name / result.relative_to(runs / study.name))


def table(study: Study) -> str:
    if not (RESULTS / study.name).is_dir():
        return "*Not measured yet.*\n"
    return of_runs(study.paths, study.allow).to_markdown()


def page(text: str) -> str:
    """The page with every table brought up to date."""
    for study in STUDIES:
        name = f"comparison: {study.name} -->"
        text = put(text, f"<!-- {name}\n", f"<!-- end of {name}", table(study))
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="RUNS")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.keep:
        keep_all(args.keep)
    if args.write:
        PAGE.write_text(page(PAGE.read_text()))
    else:
        print("\n".join(f"{study.name}\n{table(study)}" for study in STUDIES))


if __name__ == "__main__":
    main()
