"""The comparisons of docs/results/: keep what runs gave, and make their tables.

growprune compare classification-cifar10/dense --methods ... --out RUNS/cifar10-width32     # on a GPU, resumable
python experiments/comparing.py --keep RUNS      # copy every result.json of RUNS/STUDY beside this file
python experiments/comparing.py --write          # all columns into STUDY/comparison.md, short tables into docs/
growprune report experiments/compare/cifar10-width32 -o page.html   # the page; the site has it
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from page import filled, write
from run import keep
from short import by_peak, by_rate, by_sparsity, summary

from growprune.compare import Comparison, of_runs

HERE = Path(__file__).parent
RESULTS = HERE / "compare"
DOCS = HERE.parent / "docs"

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
    short: Callable[[Comparison], str] = by_sparsity
    """What makes its table on the page."""

    @property
    def paths(self) -> list[Path]:
        return [path for name in (self.name, *self.beside) if (path := RESULTS / name).is_dir()]

    @property
    def page(self) -> Path:
        """Its data set's."""
        return DOCS / "results" / f"{self.name.partition('-')[0]}.md"

    def compared(self) -> Comparison:
        return of_runs(self.paths, self.allow)


def of_patterns(base: str) -> Study:
    """The same method with other patterns."""
    return Study(f"{base}-patterns", (f"{base}/dense", f"{base}/gradual_gap-global"), ("pattern",))


def of_peaks(base: str) -> Study:
    """Quality against the peak of live weights, at 90 %."""
    rows = (f"{base}/dense", *(f"{base}/{row}/0.9" for row in BEST_PLANS))
    return Study(f"{base}-frontier", rows, short=by_peak)


def of_rates(base: str, sparsity: float) -> Study:
    """Some rows with another learning rate, beside the same with that of the task."""
    names = ("gradual_gap-global", "gradual_gap-global-control=peak", "gmp-global")
    rows = (f"{base}/dense", *(f"{base}/{row}/{sparsity}" for row in names))
    return Study(f"{base}-lr", rows, ("optimizer.lr",), by_rate)


def of_long_runs(base: str) -> Study:
    """The paper's ratio: GaP trains four times as long as dense."""
    return Study(f"{base}-paper", (f"{base}/dense",), ("epochs",))


STUDIES = (
    Study("cifar10-width32"),
    of_peaks("cifar10-width32"),
    of_long_runs("cifar10-width32"),
    of_patterns("cifar10-width32"),
    Study("cifar10-width64"),
    Study("cifar10-small"),
    Study("multi30k"),
    of_peaks("multi30k"),
    of_rates("multi30k", 0.8),
    of_long_runs("multi30k"),
    of_patterns("multi30k"),
    Study("shakespeare-patterns", allow=("pattern",)),
    Study("shakespeare-small"),
    Study("shapenet"),
    Study("bccd"),
)
SUMMARY = {
    "cifar10-width64": "CIFAR-10, ResNet-18, top-1",
    "cifar10-width32": "the same, half the width",
    "shapenet": "ShapeNet, PointNet++, mIoU",
    "bccd": "blood cells, SSD300, AP",
    "multi30k": "Multi30k, Transformer, BLEU",
}
"""Studies of all methods, as docs/results.md calls them."""


def keep_all(runs: Path) -> None:
    """Copy results, which have all that tables and pages need, and nothing that says where they were made."""
    for study in STUDIES:
        for result in sorted((runs / study.name).rglob("result.json")):
            keep(result, RESULTS / study.name / result.relative_to(runs / study.name))
        for tuning in sorted((runs / study.name).rglob("tuning.json")):
            shutil.copy(tuning, RESULTS / study.name / tuning.relative_to(runs / study.name))


def files() -> dict[Path, str]:
    """What each file must hold that has tables of this script."""
    compared = {study.name: study.compared() for study in STUDIES}
    whole = {RESULTS / name / "comparison.md": found.to_markdown() for name, found in compared.items()}
    tables = {study.page: dict[str, str]() for study in STUDIES}
    for study in STUDIES:
        tables[study.page][study.name] = study.short(compared[study.name])
    front = {"summary": summary({words: compared[name] for name, words in SUMMARY.items()})}
    return whole | {page: filled(page, found) for page, found in {DOCS / "results.md": front, **tables}.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="RUNS")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.keep:
        keep_all(args.keep)
    if args.write:
        write(files())
    else:
        print("\n".join(f"{study.name}\n{study.compared().to_markdown()}" for study in STUDIES))


if __name__ == "__main__":
    main()
