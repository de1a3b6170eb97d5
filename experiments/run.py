"""Carry out the runs behind docs/results.md. What has its result.json here is not run again.

    python experiments/run.py --data DIR                    # all of them, the four studies side by side
    python experiments/run.py --data DIR --study detection-bccd --seconds 500

DIR holds cifar10.npz, multi30k/, bccd/ and shapenet_part_subset.zip. A run that is broken off is resumed next time.
Studies side by side share the machine, so their seconds do not compare with those of a run that has it for itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATA = {
    "classification-cifar10": "cifar10.npz",
    "classification-cifar10-width32": "cifar10.npz",
    "translation-multi30k": "multi30k",
    "segmentation-subset": "shapenet_part_subset.zip",
    "detection-bccd": "bccd",
}
ROWS = ("dense", "cyclic-80-uniform", "cyclic-90-uniform", "parallel-80-uniform")
NARROW = {"task.width": 32, "compile": "true", "evaluate_every": 10, "candidates": "false"}
"""What a first look at the baselines sets beside their method: half the channels, compiled."""
RECIPES_OF = {"classification-cifar10-width32": "classification-cifar10"}
"""Studies whose recipes are those of another."""
SEEDS = (0, 1)
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)
"""Exit statuses of a run that was stopped: after it saved, or before there was anything to save."""


def baseline(method: str, sparsity: float, allocation: str) -> tuple[str, dict[str, Any]]:
    chosen = {"method": method, "sparsity": sparsity, "allocation": allocation, "options.epochs": 60}
    return "dense", {**chosen, **NARROW}


def plan(**options: Any) -> tuple[str, dict[str, Any]]:
    """A plan of plans.py; what is no field of a recipe is an option of it."""
    fields = ("parts", "sparsity")
    return "plans.py:cifar10", {k if k in fields else f"options.{k}": v for k, v in options.items()}


BY_GRADIENT = {"swap": 0.3, "swap_by": "gradient"}
PLANS = {
    "plan-never-0.5": plan(order="none"),
    "plan-never-0.375": plan(order="none", start=0.375),
    "plan-never-0.375-95": plan(order="none", start=0.375, sparsity=0.95),
    "plan-swap-random-0.5": plan(order="none", swap=0.1),
    "plan-swap-gradient-0.5": plan(order="none", **BY_GRADIENT),
    "plan-swap-gradient-0.375": plan(order="none", start=0.375, **BY_GRADIENT),
    "plan-cyclic4-0.5": plan(),
    "plan-cyclic4-0.5-linear": plan(power=1),
    "plan-cyclic4-0.5-until-0.85": plan(until=0.85),
    "plan-cyclic4-0.5-every-48": plan(every=48),
    "plan-cyclic4-0.5-every-192": plan(every=192),
    "plan-cyclic4-0.5-swap-gradient": plan(**BY_GRADIENT),
    "plan-cyclic8-0.5-swap-gradient": plan(parts="balanced(8)", **BY_GRADIENT),
    "plan-cyclic4-0.7": plan(start=0.7),
    "plan-cyclic2-0.5": plan(parts="balanced(2)"),
    "plan-random4-0.5": plan(order="random", share=4, parts="per_layer()"),
    "plan-random8-0.5": plan(order="random", share=8, parts="per_layer()"),
}
"""What was tried on the way to gradual_gap: sparsity rises from the number given, what grows is what the name says."""
VARIANTS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "classification-cifar10-width32": {
        "dense": ("dense", NARROW),
        "cyclic-90-uniform": ("cyclic-90-uniform", NARROW),
        "gmp-90-global": baseline("gmp", 0.9, "global"),
        "rigl-90-erk": baseline("rigl", 0.9, "erk"),
        "acdc-90-global": baseline("acdc", 0.9, "global"),
        "set-90-erk": baseline("set", 0.9, "erk"),
        "static-90-erk": baseline("static_random", 0.9, "erk"),
        "gmp-95-global": baseline("gmp", 0.95, "global"),
        "rigl-95-erk": baseline("rigl", 0.95, "erk"),
        "acdc-95-global": baseline("acdc", 0.95, "global"),
        **PLANS,
    },
    "classification-cifar10": {
        "cyclic-80-global": ("cyclic-80-global", {}),
        "cyclic-80-uniform-longer": ("cyclic-80-uniform", {"options.epochs": 5, "options.finetune": 80}),
    },
    "translation-multi30k": {
        "cyclic-80-uniform-longer": ("cyclic-80-uniform", {"options.epochs": 5, "options.finetune": 50}),
        "cyclic-80-uniform-longer-dropout-0.2": (
            "cyclic-80-uniform",
            {"options.epochs": 5, "options.finetune": 50, "task.dropout": 0.2},
        ),
        "cyclic-80-uniform-longer-dropout-0.1": (
            "cyclic-80-uniform",
            {"options.epochs": 5, "options.finetune": 50, "task.dropout": 0.1},
        ),
    },
}
"""What else was tried where C-GaP loses more than half a point: by row, the recipe and what is set in it."""


def run(study: str, row: str, seed: int, data: Path, runs: Path, seconds: float) -> int:
    """Train one run of a study, and keep its result; returns the exit status."""
    out = runs / study / row / f"seed{seed}"
    recipe, settings = VARIANTS.get(study, {}).get(row, (row, {}))
    source = str(HERE / recipe) if ":" in recipe else f"{RECIPES_OF.get(study, study)}/{recipe}"
    status = train(source, out, data / DATA[study], {"seed": seed, **settings}, seconds)
    if (out / "result.json").exists():
        keep(out / "result.json", HERE / study / row / f"seed{seed}" / "result.json")
    return status


def train(source: str, out: Path, data: Path, settings: dict[str, Any], seconds: float) -> int:
    """Train or resume one run, and return its exit code."""
    command = [sys.executable, "-m", "growprune"]
    if (out / "recipe.json").exists():
        command += ["resume", str(out)]
    else:
        command += ["train", source, "--out", str(out)]
        command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    process = subprocess.Popen([*command, "--data", str(data)])
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # which saves
        process.wait()
    return process.returncode


def keep(result: Path, place: Path) -> None:
    """Copy a result, without where data and weights lay."""
    content = json.loads(result.read_text())
    content["recipe"]["weights"] = Path(content["recipe"].get("weights", "")).name
    content["recipe"]["task"]["data"] = Path(content["recipe"]["task"]["data"]).name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(content, indent=1) + "\n")


def work(study: str, args: argparse.Namespace, deadline: float) -> bool:
    """Carry out the runs of a study without a result, until one fails or is stopped; tells whether one failed."""
    rows = () if study in RECIPES_OF else ROWS
    for seed, row in itertools.product(SEEDS, [*rows, *VARIANTS.get(study, {})]):
        left = deadline - time.monotonic()
        if left > 0 and not (HERE / study / row / f"seed{seed}" / "result.json").exists():
            status = run(study, row, seed, args.data, args.runs, left)
            if status in STOPPED:
                return False
            if status:
                return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--study", choices=DATA, action="append", help="only this one; may be given again")
    parser.add_argument("--runs", type=Path, default=Path("runs/experiments"), help="where the run folders go")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop, saving, after so long")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    studies = args.study or list(DATA)
    try:
        with ThreadPoolExecutor(len(studies)) as lanes:
            failed = list(lanes.map(lambda study: work(study, args, deadline), studies))
    except KeyboardInterrupt:  # which the runs got too, and saved
        sys.exit(128 + signal.SIGINT)
    sys.exit(any(failed))


if __name__ == "__main__":
    main()
