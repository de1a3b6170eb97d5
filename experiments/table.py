"""Tables of the recipes that were run as they are, from the results beside this file.

python experiments/table.py           # print them
python experiments/table.py --write   # all columns into STUDY/table.md, those that matter most into docs/results/
"""

from __future__ import annotations

import statistics
from pathlib import Path

from page import filled, markdown, write_or_print
from run import NARROW, RECIPES_OF, VARIANTS

from growprune.runs import Record, find_runs

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs" / "results"
METRICS = {
    "classification-cifar10": ("top1", "top5"),
    "classification-cifar10-width32": ("top1", "top5"),
    "translation-multi30k": ("bleu", "perplexity"),
    "segmentation-subset": ("instance_miou", "class_miou"),
    "detection-bccd": ("map", "map50"),
}
PAGES = {
    "classification-cifar10": "cifar10.md",
    "translation-multi30k": "multi30k.md",
    "segmentation-subset": "shapenet.md",
    "detection-bccd": "bccd.md",
}
SHOWN = ("recipe", "minus dense", "peak", "file, MB", "epochs")
"""Columns of docs/results/, beside the first metric."""
ORDER = ("dense", "one-shot", "cyclic", "parallel", "random", "gmp", "acdc", "rigl", "set", "static", "plan")


def results(study: str) -> dict[str, list[Record]]:
    """By row, the runs of its seeds."""
    rows: dict[str, list[Record]] = {}
    for run in find_runs([HERE / study]):
        rows.setdefault(run.path.parent.name, []).append(run)
    return dict(sorted(rows.items(), key=lambda item: (_place(item[0]), item[0])))


def _place(row: str) -> int:
    return next(place for place, method in enumerate(ORDER) if row.startswith(method))


def label(study: str, row: str) -> str:
    """The recipe of a row, and what is set in it."""
    recipe, settings = VARIANTS.get(study, {}).get(row, (row, {}))
    source = recipe if ":" in recipe else f"{RECIPES_OF.get(study, study)}/{recipe}"
    own = settings.items() - NARROW.items() if study in RECIPES_OF else settings.items()
    return " ".join(
        [f"`{source}`", *(f"`--set {key}={settings[key]}`" for key in settings if (key, settings[key]) in own)]
    )


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def rows(study: str) -> list[dict[str, str]]:
    """By column: mean and standard deviation over seeds, on the test split, of the last model of each run."""
    found, metrics = results(study), METRICS[study]
    dense = {run.seed: run.figure("test")[metrics[0]] for run in found.get("dense", [])}
    return [
        {"recipe": label(study, row)} | cells(runs, metrics, {} if row == "dense" else dense)
        for row, runs in found.items()
    ]


def cells(runs: list[Record], metrics: tuple[str, str], dense: dict[int, float]) -> dict[str, str]:
    """Of the seeds of a row; dense are the scores that it is compared with."""
    first, prunable = runs[0], runs[0].total("prunable")
    gaps = [run.figure("test")[metrics[0]] - dense[run.seed] for run in runs if run.seed in dense]
    return {
        "seeds": str(len(runs)),
        **{metric: spread([run.figure("test")[metric] for run in runs]) for metric in metrics},
        "minus dense": f"{statistics.mean(gaps):+.2f}" if gaps else "",
        "alive": f"{first.total('alive') / prunable:.0%} of {prunable / 1e6:.2f} M",
        "peak": f"{max(row['alive'] for run in runs for row in run.history) / prunable:.2f}",
        "FLOPs": f"{first.total('flops_sparse') / 1e9:.3f} G",
        "file, MB": f"{first.figure('file_bytes') / 1e6:.2f}",
        "epochs": str(first.epochs),
        "s a run": f"{statistics.mean(run.figure('seconds') for run in runs):.0f}",
    }


def table(study: str, shown: tuple[str, ...] = ()) -> str:
    """All columns, or some."""
    found = rows(study)
    heads = shown or tuple(found[0])
    return markdown(heads, [[row[head] for head in heads] for row in found])


def files() -> dict[Path, str]:
    """What each file must hold that has tables of this script."""
    whole = {HERE / study / "table.md": table(study) for study in METRICS}
    pages = {
        DOCS / page: {study: table(study, ("recipe", METRICS[study][0], *SHOWN[1:]))} for study, page in PAGES.items()
    }
    return whole | {page: filled(page, tables) for page, tables in pages.items()}


if __name__ == "__main__":
    write_or_print(__doc__, files())
