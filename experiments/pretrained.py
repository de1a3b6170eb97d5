"""Make trained models sparse: the runs behind the table of docs/pretrained.md.

    python experiments/pretrained.py --data DIR --seconds 500    # train, or resume what is not finished
    python experiments/pretrained.py --table                     # print the table; --write puts it into the page

First each study's dense model is trained (its recipe `dense`). Then every row starts from those weights and has the
same epochs, optimizer and one learning-rate curve. DIR is that of run.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from run import STOPPED, keep, kept, train
from tables import put, spread

from growprune.runs import find_runs

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "pretrained.md"
RESULTS = HERE / "pretrained"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->"
SEEDS = (0, 1)
SPARSITIES = (0.8, 0.9)


@dataclass(frozen=True)
class Study:
    data: str
    metric: str
    epochs: int
    """Of every row, after the dense training; an eighth of them is a step of C-GaP's two rounds at most."""
    lr: float
    """Chosen among three by the validation of GMP at 90 %, so not in favour of what is ours."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of all runs, the dense one too."""


SELDOM = {"evaluate_every": 10, "candidates": "false"}
HALF_WIDTH = {"task.width": 32, "compile": "true", **SELDOM}
STUDIES = {
    "classification-cifar10": Study("cifar10.npz", "top1", epochs=16, lr=0.2, settings=HALF_WIDTH),
    "translation-multi30k": Study("multi30k", "bleu", epochs=16, lr=1e-3, settings=SELDOM),
}
MAIN = ("classification-cifar10", "translation-multi30k")


def rows(study: Study) -> dict[str, dict[str, Any]]:
    """By row, what is set in the dense recipe; the reference trains on dense."""
    E = study.epochs
    gradual = {"method": "gradual_gap", "options.epochs": E, "parts": "balanced(4)"}
    step = max(1, E // 24)
    cyclic = {"method": "cyclic_gap", "options.steps": 8, "options.epochs": step, "options.finetune": E - 8 * step}
    return {
        "dense": {"options.epochs": E},
        "one_shot": {"method": "one_shot", "options.epochs": 0, "options.finetune": E},
        "gmp": {"method": "gmp", "options.epochs": E},
        "gradual_gap": {**gradual, "options.initial_mask": "magnitude"},
        "gradual_gap-random": gradual,
        "cyclic_gap": {
            **cyclic,
            "options.restart": "false",
            "options.initial_mask": "magnitude",
            "parts": "balanced(4)",
        },
    }


LABELS = {
    "dense": "dense, trained on",
    "one_shot": "`one_shot`: prune, fine-tune",
    "gmp": "`gmp`",
    "gradual_gap": "`gradual_gap`, `initial_mask=magnitude`",
    "gradual_gap-random": "`gradual_gap`, random mask",
    "cyclic_gap": "`cyclic_gap`, `initial_mask=magnitude`",
}


def jobs(name: str, seed: int, runs: Path) -> list[tuple[str, Path, dict[str, Any]]]:
    """Name, run folder and settings of each run, the dense one, from which all others start, first."""
    study, start = STUDIES[name], runs / name / "start" / f"seed{seed}"
    found = [("start", start, {**study.settings, "seed": seed})]
    both = {**study.settings, "seed": seed, "weights": start, "optimizer.lr": study.lr, "allocation": "global"}
    for row, settings in rows(study).items():
        for sparsity in SPARSITIES if row != "dense" else (0,):
            named = f"{row}-{sparsity:g}" if sparsity else row
            chosen = {**settings, **both, **({"sparsity": sparsity} if sparsity else {})}
            found.append((named, runs / name / named / f"seed{seed}", chosen))
    return found


def work(name: str, args: argparse.Namespace, deadline: float) -> int:
    """Carry out the runs of a study that have no result, until one fails or time is up."""
    done, status = kept(args.results / name), 0
    for row, out, settings in [job for seed in SEEDS for job in jobs(name, seed, args.runs)]:
        left = deadline - time.monotonic()
        if left > 0 and not status and f"{row}/{out.name}" not in done:
            status = train(f"{name}/dense", out, args.data / STUDIES[name].data, settings, left)
    keep(args.runs / name, args.results / name)
    return 0 if status in STOPPED else status


def table(results: Path) -> str:
    """What came of the main studies, in markdown; test figures of the last model."""
    lines = []
    for name in [name for name in STUDIES if (results / name).is_dir()]:
        metric = STUDIES[name].metric
        found = scores(results / name, metric)
        lines += [
            f"`{name}/dense`, then {STUDIES[name].epochs} epochs ({metric}, test; means of {len(SEEDS)} seeds):",
            "",
        ]
        lines += ["| | " + " | ".join(f"{s:.0%}" for s in SPARSITIES) + " |", "|---|" + "---:|" * len(SPARSITIES)]
        reference = {"start": "dense, where all start", "dense": LABELS["dense"]}
        for row, label in {**reference, **{k: v for k, v in LABELS.items() if k != "dense"}}.items():
            values = [found.get(row if row in reference else f"{row}-{s:g}", []) for s in SPARSITIES]
            cells = [spread(each) if each else "" for each in values]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines) + "\n"


def scores(folder: Path, metric: str) -> dict[str, list[float]]:
    """By row, the test figures of a study's seeds."""
    rows: dict[str, list[float]] = {}
    for run in find_runs([folder]):
        rows.setdefault(run.path.parent.name, []).append(run.figure("test")[metric])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--study", choices=STUDIES, action="append", help="only this one; may be given again")
    parser.add_argument("--runs", type=Path, default=Path("runs/pretrained"), help="where the run folders go")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where their results are kept")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop, saving, after so long")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.data is not None:
        deadline = time.monotonic() + args.seconds
        for name in args.study or MAIN:
            if status := work(name, args, deadline):
                sys.exit(status)
    if args.table or args.write:
        print(table(args.results))
    if args.write:
        PAGE.write_text(put(PAGE.read_text(), BEGIN, END, table(args.results)))


if __name__ == "__main__":
    main()
