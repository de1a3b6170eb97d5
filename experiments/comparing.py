"""The comparisons of docs/results.md: keep what runs gave, and make the tables and the pages.

growprune compare classification-cifar10/dense --methods ... --out RUNS/cifar10-width32     # on a GPU, resumable
python experiments/comparing.py --keep RUNS      # copy every result.json of RUNS/STUDY beside this file
python experiments/comparing.py --write          # bring the tables of docs/results.md up to date
growprune report experiments/compare/cifar10-width32 -o page.html   # the page; the site has it
"""

from __future__ import annotations

import argparse
from pathlib import Path

from page import put
from run import keep

from growprune.compare import of_runs

HERE = Path(__file__).parent
RESULTS = HERE / "compare"
PAGE = HERE.parent / "docs" / "results.md"
STUDIES = (
    "cifar10-width32",
    "cifar10-width32-patterns",
    "multi30k",
    "multi30k-patterns",
    "shakespeare-patterns",
    "shapenet",
    "bccd",
)
OF_ALL_PATTERNS = ("dense", "gradual_gap-global")
"""Rows that a study of patterns shares with the study it is named after."""


def keep_all(runs: Path) -> None:
    """Copy results, which have all that tables and pages need, and nothing that says where they were made."""
    for study in STUDIES:
        for result in sorted((runs / study).rglob("result.json")):
            keep(result, RESULTS / study / result.relative_to(runs / study))


def table(study: str) -> str:
    if not (RESULTS / study).is_dir():
        return "*Not measured yet.*\n"
    base = study.removesuffix("-patterns")
    shared = [RESULTS / base / row for row in OF_ALL_PATTERNS if (RESULTS / base / row).is_dir() and base != study]
    return of_runs([RESULTS / study, *shared], ["pattern"] if base != study else []).to_markdown()


def page(text: str) -> str:
    """The page with every table brought up to date."""
    for study in STUDIES:
        text = put(text, f"<!-- comparison: {study} -->\n", f"<!-- end of comparison: {study} -->", table(study))
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
        print("\n".join(f"{study}\n{table(study)}" for study in STUDIES))


if __name__ == "__main__":
    main()
