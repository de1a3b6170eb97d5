"""The tables of docs/ and of this folder that come from stored runs.

    python experiments/tables.py                 # print the files that have tables
    python experiments/tables.py --write         # bring them up to date
    python experiments/tables.py --keep RUNS     # first add the runs of RUNS/STUDY to compare/STUDY/results.json

`growprune compare experiments/compare/STUDY` and `growprune report experiments/compare/STUDY -o page.html` show a study
by themselves.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from run import NARROW, RECIPES_OF, VARIANTS, keep

from growprune.compare import Comparison, of_runs
from growprune.runs import Record, RunRow, find_runs
from growprune.runs.table import notes_on_versions

HERE = Path(__file__).parent
RESULTS = HERE / "compare"
DOCS = HERE.parent / "docs"
OTHERS = DOCS / "results" / "others.md"

# Tables inside of pages, between two lines that stay


def put(text: str, begin: str, end: str, content: str) -> str:
    """The text with other content between the two lines, each of which it must have once."""
    if text.count(begin) != 1 or text.partition(begin)[2].count(end) != 1:
        raise ValueError(f"the page must have the lines {begin.strip()} and {end.strip()} once each")
    before, _, rest = text.partition(begin)
    return before + begin + content + end + rest.partition(end)[2]


def filled(page: Path, tables: Mapping[str, str]) -> str:
    """The page with each table between `<!-- NAME -->` and `<!-- end of NAME -->`."""
    text = page.read_text()
    for name, table in tables.items():
        text = put(text, f"<!-- {name} -->\n", f"<!-- end of {name} -->", table)
    return text


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with its names to the left and its numbers to the right."""
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def spread(values: Sequence[float]) -> str:
    """Mean, and standard deviation if there are several values."""
    return f"{statistics.mean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


# Short forms of comparisons: fewer columns, and one line for a method at all its sparsities


def by_sparsity(found: Comparison) -> str:
    """A line a row, the best first; for each sparsity its score, and how far that is from dense."""
    sparsities = sorted({row.sparsity for row in found.rows if not row.is_dense})
    heads = ["row", *(head for s in sparsities for head in (f"{100 * s:g} %", "vs dense"))]
    sign = 1 if found.metric.lower_is_better else -1
    names: dict[str, list[RunRow]] = {}
    for row in sorted(found.rows, key=lambda row: (row.sparsity, sign * mean(row))):  # dense is first
        names.setdefault(row.name, []).append(row)
    lines = []
    for name, rows in names.items():
        at = dict.fromkeys(sparsities, rows[0]) if rows[0].is_dense else {row.sparsity: row for row in rows}
        scores = [cell for s in sparsities for cell in (_scores(found, at[s]) if s in at else ("", ""))]
        peak = f"{max(mean(row, 'peak_alive') for row in rows):.2f}"
        flops = ", ".join(f"{mean(row, 'training_flops'):.2f}" for row in rows)
        runs = list(dict.fromkeys(str(len(row.runs)) for row in rows))
        runs = runs if len(runs) == 1 else [str(len(row.runs)) for row in rows]
        lines.append([name, *scores, peak, flops, ", ".join(runs)])
    return markdown([*heads, "peak alive", "training FLOPs", "runs"], lines)


def by_peak(found: Comparison) -> str:
    """Rows that are in no other table, by the largest share of the weights that lived."""
    rows = [row for row in found.rows if not row.is_dense and len(row.runs) == 1]
    rows.sort(key=lambda row: (round(mean(row, "peak_alive"), 2), row.name))
    return markdown(
        ["row", "peak alive", "test", "vs dense"],
        [[row.name, f"{mean(row, 'peak_alive'):.2f}", *_scores(found, row)] for row in rows],
    )


def by_rate(found: Comparison) -> str:
    """A line a method, a column a learning rate: test score (validation loss), over the seeds that all rates have."""
    rows: dict[str, dict[str, str]] = {}
    common = set.intersection(*(set(row.values("test")) for row in found.rows))
    for row in found.rows:
        name, _, rate = row.name.partition(" optimizer.lr=")
        runs = [run for run in row.runs if run.seed in common]
        losses = [run.figure("validation")["loss"] for run in runs]
        score = sum(run.test or 0.0 for run in runs) / len(runs)
        rows.setdefault(name, {})[rate] = f"{score:.2f} ({sum(losses) / len(losses):.3f})"
    rates = sorted(rows["dense"])
    return markdown(["row", *rates], [[name, *(cells[rate] for rate in rates)] for name, cells in rows.items()])


def mean(row: RunRow, figure: str = "test") -> float:
    """The mean over seeds of a number that all rows have."""
    found = row.mean(figure)
    assert found is not None, row.name
    return found


def _scores(found: Comparison, row: RunRow) -> tuple[str, str]:
    cells = found.cells(row)
    return cells["test"], cells["vs dense"]


# The comparisons


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
    def page(self) -> Path:
        """Its data set's, or the page that smaller studies share."""
        own = DOCS / "results" / f"{self.name.partition('-')[0]}.md"
        return own if own.exists() else OTHERS

    def compared(self) -> Comparison:
        return of_runs([RESULTS / name for name in (self.name, *self.beside)], self.allow)


def of_patterns(base: str) -> Study:
    """The same method with other patterns."""
    return Study(f"{base}-patterns", (f"{base}/dense", f"{base}/gradual_gap-global"), ("pattern",))


BEST_PLANS = (
    *("gradual_gap-global", "gradual_gap-global-control=peak", "gradual_gap-global-control=start"),
    *("gradual_gap-global-power=3", "gradual_gap-global-power=3-control=peak", "granet-global", "granet-erk"),
    *("dpf-global", "gmp-global", "acdc-global", "rigl-erk", "cyclic_gap-uniform"),
)
"""Rows that are shown with more and fewer live weights, and those that have but one peak."""


def of_peaks(base: str, plans: Sequence[str] = BEST_PLANS) -> Study:
    """Quality against the peak of live weights, at 90 %."""
    return Study(f"{base}-frontier", (f"{base}/dense", *(f"{base}/{row}/0.9" for row in plans)), short=by_peak)


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
    of_peaks("multi30k", (*BEST_PLANS[:5], *BEST_PLANS[7:10])),
    of_rates("multi30k", 0.8),
    of_long_runs("multi30k"),
    of_patterns("multi30k"),
    Study("shakespeare-patterns", allow=("pattern",)),
    Study("shakespeare-small"),
    Study("shapenet"),
    Study("bccd"),
)
WITH_CURVES = ("cifar10-width32",)
"""Studies whose page, with its charts, is on the site."""
TASKS = {
    "cifar10-width64": "CIFAR-10, ResNet-18, top-1",
    "cifar10-width32": "the same, half the width",
    "shapenet": "ShapeNet, PointNet++, mIoU",
    "bccd": "blood cells, SSD300, AP",
    "multi30k": "Multi30k, Transformer, BLEU",
}
"""Studies of all methods, as docs/results.md calls them. In all of them more is better."""
EVEN, CUBIC = "gradual_gap:global", "gradual_gap:global power=3"
"""Rows that grow, as their sparsity rises."""
COLUMNS = {"DPF": "dpf:global", "GMP": "gmp:global", "never growing": f"{EVEN} control=peak", "gradual_gap": EVEN}
PAIRS = {
    "growth, equal peak": (EVEN, f"{EVEN} control=peak"),
    "growth, equal start": (EVEN, f"{EVEN} control=start"),
    "cubic, growing": (CUBIC, EVEN),
    "cubic, never growing": (f"{CUBIC} control=peak", f"{EVEN} control=peak"),
}
"""Which row is compared with which, by column of docs/theory.md."""


def summary(found: Mapping[str, Comparison]) -> str:
    """A line for each task and sparsity: scores, and what `gradual_gap` is ahead of dense."""
    lines = []
    for study, task in TASKS.items():
        dense = next(row for row in found[study].rows if row.is_dense)
        for sparsity, rows in _by_sparsity(found[study]):
            scores = [f"{mean(rows[name]):.2f}" for name in COLUMNS.values()]
            gap = _scores(found[study], rows[EVEN])[1]
            lines.append([task, f"{100 * sparsity:g} %", f"{mean(dense):.2f}", *scores, gap])
    return markdown(["task", "sparsity", "dense", *COLUMNS, "gradual_gap vs dense"], lines)


def front(found: Comparison) -> str:
    """One result for the front page: accuracy, and the most weights that are held at a time."""
    rows = dict(_by_sparsity(found))[0.9]
    dense = next(row for row in found.rows if row.is_dense)
    shown = {"dense": dense, "GMP": rows[COLUMNS["GMP"]], "`gradual_gap`": rows[EVEN]}
    peaks = [f"{100 * mean(row, 'peak_alive'):.0f} %" for row in shown.values()]
    scores = [f"{mean(row):.2f} %" for row in shown.values()]
    return markdown(["ResNet-18 on CIFAR-10", *shown], [["test accuracy", *scores], ["most non-zero weights", *peaks]])


TUNED = {"cifar10-small": "CIFAR-10, ResNet-18 of a quarter of the width, top-1"}
TUNED |= {"shakespeare-small": "Shakespeare, tiny GPT, bits per byte (lower is better)"}


def tuned_alike(found: Mapping[str, Comparison]) -> str:
    """A line for each task of which all rows were tuned alike: their scores, by method."""
    names = {"dense": "dense", "small dense": "small_dense", "GMP": "gmp:global", "RigL": "rigl:erk"}
    names |= {"never growing": f"{EVEN} control=peak", "`gradual_gap`": EVEN}
    lines = []
    for study, task in TUNED.items():
        rows = {" ".join(w for w in row.name.split() if not w.startswith("every=")): row for row in found[study].rows}
        lines.append([task, *(found[study].cells(rows[name])["test"] for name in names.values())])
    return markdown(["task, 90 % sparse", *names], lines)


def controls(found: Mapping[str, Comparison]) -> str:
    """What growth itself brings, and what the rise of the sparsity does: a line for each study and sparsity."""
    names = {"cifar10-width32": "CIFAR-10, half the width", "cifar10-width64": "CIFAR-10, full width"}
    names |= {"shapenet": "ShapeNet", "bccd": "blood cells", "multi30k": "Multi30k"}
    lines = []
    for study, name in names.items():
        for sparsity, rows in _by_sparsity(found[study]):
            gaps = [_difference(rows.get(ours), rows.get(theirs)) for ours, theirs in PAIRS.values()]
            lines.append([name, f"{100 * sparsity:g} %", *gaps])
    return markdown(["task", "sparsity", *PAIRS], lines)


def _by_sparsity(found: Comparison) -> Iterator[tuple[float, dict[str, RunRow]]]:
    """The rows of each sparsity, by name without how often they edit, which depends on the length of training."""
    for sparsity in sorted({row.sparsity for row in found.rows if not row.is_dense}):
        rows = [row for row in found.rows if row.sparsity == sparsity]
        yield sparsity, {" ".join(w for w in row.name.split() if not w.startswith("every=")): row for row in rows}


def _difference(ours: RunRow | None, theirs: RunRow | None) -> str:
    gap = ours.minus(theirs) if ours and theirs else None
    if gap is None:
        return "-"
    error = "" if gap.standard_error is None else f" ± {gap.standard_error:.2f}"
    return f"{gap.mean:+.2f}{error} ({gap.count})"


def rates(study: str, decimals: int) -> str:
    """Validation scores of one seed: a line for each tuned row that is sparse, a column for each point of the grid."""
    lines, heads = [], [""]
    for tuning in of_runs([RESULTS / study]).tunings:
        if len(tuning["points"]) == tuning["size"]:  # lr_scaling does nothing to a dense model
            heads = [point["name"].replace("optimizer.", "") for point in tuning["points"]]
            lines.append([tuning["row"], *(f"{point['validation']:.{decimals}f}" for point in tuning["points"])])
    return markdown(["row", *heads], lines)


def choices() -> str:
    """Validation scores of gradual_gap with other settings, by seed: a line for each setting, the default first."""
    seeds, default = ("seed0", "seed1"), "gradual_gap-global/0.9/optimizer.lr=0.004-lr_scaling=1"
    folders = {"default: lr_scaling=1, until=0.75, begin=0": RESULTS / "shakespeare-small" / default}
    folders |= {name: RESULTS / "shakespeare-choices" / name for name in ("begin=0.25", "lr_scaling=0.5", "until=0.85")}
    lines = []
    for name, folder in folders.items():
        runs = [find_runs([folder / seed])[0] for seed in seeds]
        lines.append([name, *(f"{run.figure('validation')['bits_per_byte']:.3f}" for run in runs)])
    return markdown(["gradual_gap, 90 %", *seeds], lines)


# The recipes that were run as they are

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
    "segmentation-subset": "others.md",
    "detection-bccd": "others.md",
}
SHOWN = ("recipe", "minus dense", "peak", "file, MB", "epochs")
"""Columns of docs/results/, beside the first metric."""
ORDER = ("dense", "one-shot", "cyclic", "parallel", "random", "gmp", "acdc", "rigl", "set", "static", "plan")


def results(study: str) -> dict[str, list[Record]]:
    """By row, the runs of its seeds."""
    rows: dict[str, list[Record]] = {}
    for run in find_runs([HERE / study]):
        rows.setdefault(run.path.parent.name, []).append(run)

    def place(row: str) -> tuple[int, str]:
        return next(place for place, method in enumerate(ORDER) if row.startswith(method)), row

    return {row: rows[row] for row in sorted(rows, key=place)}


def label(study: str, row: str) -> str:
    """The recipe of a row, and what is set in it."""
    recipe, settings = VARIANTS.get(study, {}).get(row, (row, {}))
    source = recipe if ":" in recipe else f"{RECIPES_OF.get(study, study)}/{recipe}"
    own = settings.items() - NARROW.items() if study in RECIPES_OF else settings.items()
    return " ".join(
        [f"`{source}`", *(f"`--set {key}={settings[key]}`" for key in settings if (key, settings[key]) in own)]
    )


def cells(runs: list[Record], metrics: tuple[str, str], dense: dict[int, float]) -> dict[str, str]:
    """By column, for the seeds of a row: on the test split, of the last model. Dense are the scores of dense runs."""
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


def of_recipes(study: str, shown: tuple[str, ...] = ()) -> str:
    """The table of a study with all columns and notes, or with some columns."""
    found, metrics = results(study), METRICS[study]
    dense = {run.seed: run.figure("test")[metrics[0]] for run in found["dense"]}
    rows = []
    for name, runs in found.items():
        rows.append({"recipe": label(study, name), **cells(runs, metrics, {} if name == "dense" else dense)})
    table = markdown(shown or [*rows[0]], [[row[head] for head in shown or row] for row in rows])
    notes = notes_on_versions([run for runs in found.values() for run in runs])
    return table if shown else "\n".join([table, *(f"- {note}" for note in notes)]) + "\n"


# All files


def files() -> dict[Path, str]:
    """What each file must hold that has tables of this script."""
    compared = {study.name: study.compared() for study in STUDIES}
    made = {RESULTS / name / "comparison.md": found.to_markdown() for name, found in compared.items()}
    made |= {HERE / study / "table.md": of_recipes(study) for study in METRICS}
    tables: dict[Path, dict[str, str]] = {
        DOCS / "results.md": {"summary": summary(compared), "tuned": tuned_alike(compared)}
    }
    tables[DOCS / "index.md"] = {"front": front(compared["cifar10-width64"])}
    for study in STUDIES:
        tables.setdefault(study.page, {})[study.name] = study.short(compared[study.name])
    for name, page in PAGES.items():
        tables[DOCS / "results" / page][name] = of_recipes(name, ("recipe", METRICS[name][0], *SHOWN[1:]))
    tables[OTHERS]["choices"] = choices()
    tuned = {"lr_scaling": rates("shakespeare-small", 3), "lr_scaling_sgd": rates("cifar10-small", 1)}
    tables[DOCS / "theory.md"] = {"controls": controls(compared), **tuned}
    return made | {page: filled(page, found) for page, found in tables.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="RUNS")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.keep:
        for study in [study for study in STUDIES if (args.keep / study.name).is_dir()]:
            keep(args.keep / study.name, RESULTS / study.name, with_curves=study.name in WITH_CURVES)
    for path, text in files().items():
        path.write_text(text) if args.write else print(f"{path}\n\n{text}")


if __name__ == "__main__":
    main()
