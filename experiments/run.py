"""Carry out the runs behind docs/results.md. What has its result.json here is not run again.

    python experiments/run.py --data DIR                    # all of them, the four studies side by side
    python experiments/run.py --data DIR --study detection-bccd --seconds 500

DIR holds cifar10.npz, multi30k/, bccd/ and shapenet_part_subset.zip. A run that is broken off is resumed next time.
Studies side by side share the machine, so their seconds do not compare with those of a run that has it for itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
DATA = {
    "classification-cifar10": "cifar10.npz",
    "translation-multi30k": "multi30k",
    "segmentation-subset": "shapenet_part_subset.zip",
    "detection-bccd": "bccd",
}
ROWS = ("dense", "cyclic-80-uniform", "cyclic-90-uniform", "parallel-80-uniform")
SEEDS = (0, 1)
LONGER = {
    "classification-cifar10": {"options.epochs": 6, "options.finetune": 60},
    "translation-multi30k": {"options.epochs": 7, "options.finetune": 40},
}
"""Where C-GaP loses with the epochs of dense training, the same recipe as `cyclic-80-uniform-longer`."""


def run(study: str, row: str, seed: int, data: Path, runs: Path, seconds: float) -> None:
    """Train, or go on with, one run, and keep its result."""
    out = runs / study / row / f"seed{seed}"
    command = [sys.executable, "-m", "growprune"]
    if (out / "recipe.json").exists():
        command += ["resume", str(out)]
    else:
        settings = {"seed": seed, **(LONGER[study] if row.endswith("-longer") else {})}
        command += ["train", f"{study}/{row.removesuffix('-longer')}", "--out", str(out)]
        command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    process = subprocess.Popen([*command, "--data", str(data / DATA[study])])
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # which saves
        process.wait()
    if (out / "result.json").exists():
        keep(out / "result.json", HERE / study / row / f"seed{seed}" / "result.json")


def keep(result: Path, place: Path) -> None:
    """Copy a result, without where the data lay."""
    content = json.loads(result.read_text())
    content["recipe"]["task"]["data"] = Path(content["recipe"]["task"]["data"]).name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(content, indent=1) + "\n")


def work(study: str, args: argparse.Namespace, deadline: float) -> None:
    rows = [*ROWS, *(["cyclic-80-uniform-longer"] if study in LONGER else [])]
    for seed in SEEDS:
        for row in rows:
            left = deadline - time.monotonic()
            if left > 0 and not (HERE / study / row / f"seed{seed}" / "result.json").exists():
                run(study, row, seed, args.data, args.runs, left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--study", choices=DATA, action="append", help="only this one; may be given again")
    parser.add_argument("--runs", type=Path, default=Path("runs/experiments"), help="where the run folders go")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop, saving, after so long")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    studies = args.study or list(DATA)
    with ThreadPoolExecutor(len(studies)) as lanes:
        list(lanes.map(lambda study: work(study, args, deadline), studies))


if __name__ == "__main__":
    main()
