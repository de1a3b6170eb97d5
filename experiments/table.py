"""The tables of docs/results.md, from the results beside this file.

python experiments/table.py           # print them
python experiments/table.py --write   # put them into docs/results.md
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from page import put, write_or_print
from run import NARROW, RECIPES_OF, VARIANTS

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


def results(study: str) -> dict[str, list[dict[str, Any]]]:
    """By row, what its seeds gave."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((HERE / study).glob("*/seed*/result.json")):
        rows.setdefault(path.parts[-3], []).append(json.loads(path.read_text()))
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
    dense = {result["seed"]: result["test"][metrics[0]] for result in found.get("dense", [])}
    for row, of_seeds in found.items():
        totals = of_seeds[0]["sparsity"]["totals"]
        gaps = [r["test"][metrics[0]] - dense[r["seed"]] for r in of_seeds if r["seed"] in dense and row != "dense"]
        cells = [label(study, row), str(len(of_seeds))]
        cells += [spread([result["test"][metric] for result in of_seeds]) for metric in metrics]
        cells.append(f"{statistics.mean(gaps):+.2f}" if gaps else "")
        cells.append(f"{totals['alive'] / totals['prunable']:.0%} of {totals['prunable'] / 1e6:.2f} M")
        cells.append(_peak(of_seeds))
        cells.append(f"{totals['flops_sparse'] / 1e9:.3f} G")
        cells.append(f"{of_seeds[0]['file_bytes'] / 1e6:.2f}")
        cells.append(str(len(of_seeds[0]["history"])))
        cells.append(f"{statistics.mean(result['seconds'] for result in of_seeds):.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _peak(of_seeds: list[dict[str, Any]]) -> str:
    """The largest share of the weights that lived at the end of any epoch."""
    peaks = [max(row["alive"] for row in r["history"]) / r["sparsity"]["totals"]["prunable"] for r in of_seeds]
    return f"{max(peaks):.2f}"


def page(text: str) -> str:
    """The page with every table brought up to date."""
    for study in METRICS:
        text = put(text, f"<!-- {study} -->\n", f"\n<!-- end of {study} -->", table(study))
    return text


if __name__ == "__main__":
    write_or_print(__doc__, PAGE, page, "\n\n".join(table(study) for study in METRICS))
