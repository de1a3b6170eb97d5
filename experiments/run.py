"""Carry out the runs behind docs/results.md. Runs that are in STUDY/results.json are not run again.

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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from growprune.files import disk
from growprune.runs.record import PACKED_FORMAT, RESULTS, read_packed

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
    """Train one run of a study; returns the exit status."""
    recipe, settings = VARIANTS.get(study, {}).get(row, (row, {}))
    source = str(HERE / recipe) if ":" in recipe else f"{RECIPES_OF.get(study, study)}/{recipe}"
    out = runs / study / row / f"seed{seed}"
    return train(source, out, data / DATA[study], {"seed": seed, **settings}, seconds)


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


def kept(folder: Path) -> set[str]:
    """The runs in the results file of a study, as paths in its folder of runs."""
    return set(read_packed(folder / RESULTS)[0]) if (folder / RESULTS).exists() else set()


def keep(runs: Path, folder: Path, *, with_curves: bool = False) -> None:
    """Add the results of a folder of runs to the results file of a study, without where data and weights lay.

    Only a page with charts needs the curves and layers of runs. Of runs from before live weights were counted, their
    number at the end of each epoch stays.
    """
    found, tunings = read_packed(folder / RESULTS) if (folder / RESULTS).exists() else ({}, {})
    for file in sorted(runs.rglob("result.json")):
        content = json.loads(file.read_text())
        recipe = content["recipe"]
        recipe["weights"] = Path(recipe.get("weights") or "").name
        recipe["task"]["data"] = Path(recipe["task"].get("data") or "").name
        if not with_curves:
            content["sparsity"]["rows"] = []
        names = ("epoch", "stage", "branch", "alive") if content.get("peak_alive") is None else ()
        names = CURVES if with_curves else names
        content["history"] = [{name: _short(row.get(name)) for name in names} for row in content["history"] if names]
        found[file.parent.relative_to(runs).as_posix()] = content
    for file in sorted(runs.rglob("tuning.json")):
        tunings[file.parent.relative_to(runs).as_posix()] = json.loads(file.read_text())
    found, tunings = ({name: each[name] for name in sorted(each, key=_in_folders)} for each in (found, tunings))
    content = disk.finite(pack(found, tunings))
    lines = [f'"format": {content["format"]},\n"shared": {json.dumps(content["shared"])}']
    for part in ("runs", "tunings"):  # a line for each run
        entries = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in content[part].items())
        lines.append(f'"{part}": {{\n{entries}\n}}')
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULTS).write_text("{" + ",\n".join(lines) + "}\n")


CURVES = ("epoch", "iteration", "stage", "branch", "alive", "loss", "explored", "churn", "validation")
"""What charts over time need of the history."""


def pack(runs: Mapping[str, dict[str, Any]], tunings: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The content of the file, for results by folder whose lists may have been left out."""
    packed = {name: _with_columns(run) for name, run in runs.items()}
    shared = _shared([*packed.values()])
    return {
        "format": PACKED_FORMAT,
        "shared": shared,
        "runs": {name: _without(run, shared) for name, run in packed.items()},
        "tunings": dict(tunings),
    }


def _with_columns(run: dict[str, Any]) -> dict[str, Any]:
    run = {**run, "history": _columns(run.get("history", []))}
    return run | {"sparsity": {**run["sparsity"], "rows": _columns(run["sparsity"].get("rows", []))}}


def _columns(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for entry in entries for name in entry)
    return {name: [entry.get(name) for entry in entries] for name in names}


def _shared(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The values that all runs have, and of their parts, such as the recipe, the values that all have."""
    found: dict[str, Any] = {}
    for name in [name for name in (runs[0] if runs else ()) if all(name in run for run in runs)]:
        values = [run[name] for run in runs]
        if all(value == values[0] for value in values):
            found[name] = values[0]
        elif all(isinstance(value, dict) for value in values):
            names = [key for key in values[0] if all(key in v and v[key] == values[0][key] for v in values)]
            found[name] = {key: values[0][key] for key in names}
    return found


def _without(run: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in run.items() if name not in shared}
    for name in [name for name in run if name in shared and run[name] != shared[name]]:
        kept[name] = {key: value for key, value in run[name].items() if key not in shared[name]}
    return kept


def _in_folders(name: str) -> tuple[str, ...]:
    """The order of runs in their folders."""
    return Path(name).parts


def _short(value: Any) -> Any:
    """Six digits are enough for a chart."""
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def work(study: str, args: argparse.Namespace, deadline: float) -> bool:
    """Carry out the runs of a study without a result, until one fails or is stopped; tells whether one failed."""
    rows = () if study in RECIPES_OF else ROWS
    done, status = kept(HERE / study), 0
    for seed, row in itertools.product(SEEDS, [*rows, *VARIANTS.get(study, {})]):
        left = deadline - time.monotonic()
        if left > 0 and not status and f"{row}/seed{seed}" not in done:
            status = run(study, row, seed, args.data, args.runs, left)
    if (args.runs / study).exists():
        keep(args.runs / study, HERE / study)
    return bool(status) and status not in STOPPED


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
