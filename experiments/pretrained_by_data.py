"""Prune trained models by magnitude, Wanda and SparseGPT, then retrain: the runs behind a table of docs/pretrained.md.

    python experiments/pretrained_by_data.py --data DIR    # train, or resume what is not finished
    python experiments/pretrained_by_data.py --keep        # add the runs to results.json of their study
    python experiments/pretrained_by_data.py --table       # print the table; --write puts it into the page

First each study's dense model is trained. Every other run starts from those weights: pruned, with or without
reconstruction of each block, then retrained with fixed masks for a tenth of the dense training. Calibration batches are
training data. Nothing is selected by test data. DIR has tinyshakespeare/input.txt and cifar10-small.npz; a run takes
one CPU core. Several processes share the work with `--shard 1/4`, `--shard 2/4` and so on, once the dense models exist.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from pretrained import scores
from run import keep, kept
from tables import put, spread

import growprune as gp
from growprune import engine
from growprune.engine.building import choose_device
from growprune.engine.override import override
from growprune.recipes import find

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "pretrained.md"
RESULTS = HERE / "pretrained" / "by_data"
BEGIN, END = "<!-- by data: begin -->\n", "<!-- by data: end -->"
SEEDS = (0, 1)
CALIBRATION = 256
"""Examples of the training data."""
LEVELS = ("50", "70", "80", "2:4")
SHARE = 10
"""Retraining, in percent of the dense training."""
STEPS = 64
"""Of the training of each block."""
CRITERIA: dict[str, dict[str, Any]] = {
    "magnitude": {"by": "magnitude"},
    "magnitude-reconstruct": {"by": "magnitude", "reconstruct": STEPS},
    "wanda": {"by": "wanda"},
    "wanda-reconstruct": {"by": "wanda", "reconstruct": STEPS},
    "sparsegpt": {"by": "sparsegpt"},
    "sparsegpt-reconstruct": {"by": "sparsegpt", "reconstruct": STEPS},
    "sparsegpt-steps": {"by": "sparsegpt", "steps": 4},
    "magnitude-global": {"by": "magnitude", "allocation": "global"},
    "sparsegpt-erk": {"by": "sparsegpt", "allocation": "erk"},
    "sparsegpt-erk-reconstruct": {"by": "sparsegpt", "allocation": "erk", "reconstruct": STEPS},
}
"""The arguments of prune_pretrained."""
RETRAINED = tuple(CRITERIA)[:6]
LABELS = {
    "dense": "dense, trained on",
    "magnitude": "magnitude, each layer",
    "magnitude-reconstruct": "magnitude, reconstructed",
    "wanda": "Wanda",
    "wanda-reconstruct": "Wanda, reconstructed",
    "sparsegpt": "SparseGPT",
    "sparsegpt-reconstruct": "SparseGPT, reconstructed",
    "sparsegpt-steps": "SparseGPT, in 4 steps",
    "magnitude-global": "magnitude, all layers ranked together",
    "sparsegpt-erk": 'SparseGPT, `allocation="erk"`',
    "sparsegpt-erk-reconstruct": 'SparseGPT, `allocation="erk"`, reconstructed',
}


@dataclass(frozen=True)
class Study:
    recipe: str
    data: str
    metric: str
    lr: float
    """Of retraining: half of the dense rate, not tuned."""
    settings: dict[str, Any]


ON_CPU = {"device": "cpu", "precision": "fp32", "evaluate_every": 100, "candidates": "false", "exploration": "false"}
SMALL_GPT = {"heads": 4, "d_model": 64, "ffn": 256, "layers": 3, "context": 64, "batch_size": 16, "dropout": 0}
SMALL_NET = {"width": 8, "batch_size": 32, "num_validation": 500, "workers": 0, "crop": "resized", "min_scale": 0.5}
SMALL_NET |= {"image_size": 16, "in_memory": "false"}
ENDS = {"keep_dense": '["conv1", "fc"]'}


def of_task(**settings: Any) -> dict[str, Any]:
    return {f"task.{name}": value for name, value in settings.items()}


STUDIES = {
    "language-small": Study(
        *("language-shakespeare/dense", "tinyshakespeare/input.txt", "bits_per_byte"),
        lr=1.5e-3,
        settings={**ON_CPU, **of_task(**SMALL_GPT), "options.epochs": 1, "optimizer.lr": 3e-3},
    ),
    "classification-small": Study(
        *("classification-cifar10/dense", "cifar10-small.npz", "top1"),
        lr=0.025,
        settings={**ON_CPU, **of_task(**SMALL_NET), **ENDS, "options.epochs": 5, "optimizer.lr": 0.05},
    ),
}


@dataclass(frozen=True)
class Job:
    """One run."""

    row: str
    recipe: engine.Recipe
    prune: dict[str, Any] | None = None
    """The arguments of prune_pretrained that make its file."""


def jobs(name: str, seed: int, runs: Path, data: Path) -> Iterator[Job]:
    """The runs of a study, the dense one first. The length of the others is known once it is finished."""
    study = STUDIES[name]
    base = override(find(study.recipe), {k: str(v) for k, v in study.settings.items()} | {"seed": str(seed)})
    base = replace(base, task=replace(base.task, data=str(data / study.data)))
    yield Job("start", base)
    start = runs / name / "start" / f"seed{seed}"
    length = json.loads((start / "result.json").read_text())["training_iterations"] * SHARE // 100
    schedule = replace(base.lr_schedule, warmup_epochs=0.0, warmup_iterations=0)
    after = replace(base, lr_schedule=schedule, optimizer=replace(base.optimizer, lr=study.lr), weights=str(start))
    yield Job(f"dense-{SHARE}", fixed(after, 0.0, length))
    for level in LEVELS:
        for criterion in CRITERIA:
            yield from pruned(after, level, criterion, 0)
        for criterion in RETRAINED:
            yield from pruned(after, level, criterion, length, f"-{SHARE}")


def pruned(after: engine.Recipe, level: str, criterion: str, iterations: int, end: str = "") -> Iterator[Job]:
    """Prune once, then retrain with fixed masks."""
    arguments = CRITERIA[criterion]
    if level == "2:4" and ("allocation" in arguments or "steps" in arguments):
        return  # the pattern leaves nothing to divide
    sparsity, pattern = (0.5, level) if level == "2:4" else (int(level) / 100, "unstructured")
    after = replace(after, pattern=pattern, allocation=arguments.get("allocation", "uniform"))
    yield Job(
        f"{criterion}-{_name(level)}{end}",
        fixed(after, sparsity, iterations),
        {**arguments, "sparsity": sparsity, "pattern": pattern},
    )


def fixed(recipe: engine.Recipe, sparsity: float, iterations: int) -> engine.Recipe:
    options = {"iterations": iterations, "initial_mask": "as_is"}
    return replace(recipe, method=gp.methods.static_random, options=options, sparsity=sparsity)


def make_file(job: Job, path: Path) -> None:
    """Prune the dense model, with training data as calibration, and save it."""
    recipe, task = job.recipe, job.recipe.task
    device = choose_device(recipe.device)
    model = task.build_model()
    gp.load(Path(recipe.weights) / "model.safetensors", model)
    count = -(-CALIBRATION // task.batch_size) if hasattr(task, "batch_size") else 16
    batches = list(islice(task.batches(seed=recipe.seed, start=0, device=device), count))
    kept = recipe.settings.kept_dense(model)[0]
    sparse = gp.prune_pretrained(model.to(device), batches, forward=task.loss, keep_dense=kept, **(job.prune or {}))
    path.parent.mkdir(parents=True, exist_ok=True)
    gp.save(sparse, path)


def run(job: Job, out: Path, deadline: float) -> None:
    """Train or resume one run."""
    recipe = job.recipe
    if job.prune is not None:
        file = out.with_suffix(".safetensors")
        if not (out / "recipe.json").exists():
            make_file(job, file)
        recipe = replace(recipe, weights=str(file))
    begin = engine.resume if (out / "recipe.json").exists() else engine.train
    begin(recipe, out, should_stop=lambda: time.monotonic() > deadline)


def work(name: str, args: argparse.Namespace) -> None:
    """Carry out this shard of the runs of a study that have no result, until time is up."""
    deadline, done = time.monotonic() + args.seconds, kept(args.results / name)
    shard, shards = map(int, args.shard.split("/"))
    for seed in args.seed or SEEDS:
        for number, job in enumerate(jobs(name, seed, args.runs, args.data)):
            out = args.runs / name / job.row / f"seed{seed}"
            if number and number % shards != shard - 1:  # every shard needs the dense model, the first
                continue
            if (number and f"{job.row}/seed{seed}" in done) or (out / "result.json").exists():
                continue
            try:
                run(job, out, deadline)
            except engine.Interrupted:
                return
            print(name, job.row, seed, flush=True)


def table(results: Path) -> str:
    """What came of the studies, in markdown; test figures of the last model."""
    blocks = [_block(results / name, study) for name, study in STUDIES.items() if (results / name).is_dir()]
    return "\n".join(blocks)


def _block(folder: Path, study: Study) -> str:
    found = {row: each for row, each in scores(folder, study.metric).items() if len(each) == len(SEEDS)}
    start = spread(found["start"])
    title = f"`{study.recipe}`, {folder.name} ({study.metric}, test; dense: {start}; means of {len(SEEDS)} seeds):"
    lines = [title, "", "| | retrained | " + " | ".join(_head(level) for level in LEVELS) + " |"]
    lines.append("|---|---:|" + "---:|" * len(LEVELS))
    for share, row in itertools.product((0, SHARE), LABELS):
        end = f"-{share}" if share else ""
        names = [f"dense{end}" if row == "dense" else f"{row}-{_name(level)}{end}" for level in LEVELS]
        values = [spread(found[name]) if name in found else "" for name in names]
        lines += [f"| {LABELS[row]} | {share} % | " + " | ".join(values) + " |"] if any(values) else []
    return "\n".join(lines) + "\n"


def _name(level: str) -> str:
    """As part of a folder's name."""
    return level.replace(":", "of")


def _head(level: str) -> str:
    return level if level == "2:4" else f"{level} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--study", choices=STUDIES, action="append", help="only this one; may be given again")
    parser.add_argument("--runs", type=Path, default=Path("runs/pretrained_by_data"), help="where the run folders go")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where their results are kept")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="leave a study, saving, after so long")
    parser.add_argument("--seed", type=int, choices=SEEDS, action="append", help="only this one; may be given again")
    parser.add_argument("--shard", default="1/1", help="K/N: every N-th run, from the K-th on")
    parser.add_argument("--threads", type=int, help="threads of torch; by default its own choice")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.data is not None:
        for name in args.study or STUDIES:
            work(name, args)
    for name in [name for name in STUDIES if args.keep and (args.runs / name).is_dir()]:
        keep(args.runs / name, args.results / name)
    if args.table or args.write:
        print(table(args.results))
    if args.write:
        PAGE.write_text(put(PAGE.read_text(), BEGIN, END, table(args.results)))


if __name__ == "__main__":
    main()
