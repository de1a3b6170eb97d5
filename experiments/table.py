"""The tables of docs/results.md, from the results beside this file.

python experiments/table.py           # print them
python experiments/table.py --write   # put them into docs/results.md
"""

from __future__ import annotations

import statistics
from pathlib import Path

from page import put, write_or_print
from run import NARROW, RECIPES_OF, VARIANTS

from growprune.runs import Record, find_runs

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "results.md"
METRICS = {
    "classification-cifar10": ("top1", "top5"),
    "classification-cifar10-width32": ("top1", "top5"),
    "translation-multi30k": ("bleu", "perplexity"),
    "segmentation-subset": ("instance_miou", "class_miou"),
    "detection-bccd": ("map", "map50"),
}
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


def table(study: str) -> str:
    """Mean and standard deviation over seeds, on the test split, of the last model of each run."""
    found, metrics = results(study), METRICS[study]
    heads = ["recipe", "seeds", *metrics, "minus dense", "alive", "peak", "FLOPs", "file, MB", "epochs", "s a run"]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    dense = {run.seed: run.figure("test")[metrics[0]] for run in found.get("dense", [])}
    for row, runs in found.items():
        first, alive, prunable = runs[0], runs[0].total("alive"), runs[0].total("prunable")
        scores = {metric: [run.figure("test")[metric] for run in runs] for metric in metrics}
        gaps = [
            run.figure("test")[metrics[0]] - dense[run.seed] for run in runs if run.seed in dense and row != "dense"
        ]
        cells = [label(study, row), str(len(runs)), *map(spread, scores.values())]
        cells.append(f"{statistics.mean(gaps):+.2f}" if gaps else "")
        cells.append(f"{alive / prunable:.0%} of {prunable / 1e6:.2f} M")
        cells.append(f"{max(row['alive'] for run in runs for row in run.history) / prunable:.2f}")
        cells.append(f"{first.total('flops_sparse') / 1e9:.3f} G")
        cells.append(f"{first.figure('file_bytes') / 1e6:.2f}")
        cells.append(str(first.epochs))
        cells.append(f"{statistics.mean(run.figure('seconds') for run in runs):.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with every table brought up to date."""
    for study in METRICS:
        text = put(text, f"<!-- {study} -->\n", f"\n<!-- end of {study} -->", table(study))
    return text


if __name__ == "__main__":
    write_or_print(__doc__, PAGE, page, "\n\n".join(table(study) for study in METRICS))
