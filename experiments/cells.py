"""Compare all methods, every one tuned alike, on the models of docs/results.md: the runs need a GPU.

    python experiments/cells.py --data DIR --runs RUNS                       # all, one comparison after the other
    python experiments/cells.py --data DIR --runs RUNS --only multi30k --seconds 560 --pack results.tar.gz
    python experiments/cells.py --data DIR --runs RUNS --print               # only the commands

What is broken off is resumed next time. `--pack` puts all results into one file, from which `comparing.py --keep` takes
them. Many small runs share a GPU well: start `nvidia-cuda-mps-control -d` before.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROWS = "dense,small_dense,small_dense:flops,static_random,rigl,gmp,dpf,gradual_gap"
TUNED = ("--seeds", "0,1,2", "--tune", "optimizer.lr=x1,x2", "--tune", "lr_scaling=0,1")
SELDOM = ("--set", "evaluate_every=10", "--set", "candidates=false")
WIDTH_32 = ("--set", "task.width=32")
CIFAR10 = ("classification-cifar10/dense", "cifar10.npz", "0.9,0.95", "60")
CELLS: dict[str, tuple[str, ...]] = {
    "cifar10-width32-tuned": (*CIFAR10, *WIDTH_32, "--set", "compile=true"),
    "multi30k-tuned": ("translation-multi30k/dense", "multi30k", "0.8,0.9", "40"),
    "cifar10-width64-tuned": (*CIFAR10, "--set", "compile=true"),
    "shapenet-tuned": ("segmentation-subset/dense", "shapenet_part_subset.zip", "0.8,0.9", "60"),
    "bccd-tuned": ("detection-bccd/dense", "bccd", "0.8,0.9", "120"),
    "shakespeare-tuned": ("language-shakespeare/dense", "tinyshakespeare/input.txt", "0.8,0.9", "30"),
}
"""By study: recipe, data, sparsities, epochs, and what is set; those that matter most first."""


def command(study: str, data: Path, runs: Path, workers: int) -> list[str]:
    recipe, file, sparsities, epochs, *settings = CELLS[study]
    fixed = ["--methods", ROWS, "--sparsities", sparsities, "--epochs", epochs, *TUNED, *SELDOM, *settings]
    places = ["--data", str(data / file), "--out", str(runs / study), "--workers", str(workers)]
    return [sys.executable, "-m", "growprune", "compare", recipe, *fixed, *places]


def carry_out(words: list[str], seconds: float) -> int | None:
    """Run a comparison; None if time ran out, and it saved."""
    process = subprocess.Popen(words)
    try:
        return process.wait(seconds if seconds != float("inf") else None)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        return None


def pack(runs: Path, file: Path) -> None:
    """All that tables need, in one file."""
    with tarfile.open(file, "w:gz") as archive:
        for name in ("result.json", "tuning.json"):
            for result in sorted(runs.rglob(name)):
                archive.add(result, result.relative_to(runs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the data of all tasks")
    parser.add_argument("--runs", type=Path, required=True, help="where the run folders go")
    parser.add_argument("--only", choices=CELLS, action="append", help="only this one; may be given again")
    parser.add_argument("--workers", type=int, default=16, help="how many runs at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop, saving, after so long")
    parser.add_argument("--pack", type=Path, help="write all results to this file at the end")
    parser.add_argument("--print", action="store_true", help="print the commands, run nothing")
    args = parser.parse_args()
    end, failed = time.monotonic() + args.seconds, False
    for study in args.only or CELLS:
        words = command(study, args.data, args.runs, args.workers)
        if args.print:
            print(shlex.join(["growprune", *words[3:]]))
        elif (left := end - time.monotonic()) > 0:
            failed |= bool(carry_out(words, left))
    if args.pack:
        pack(args.runs, args.pack)
    sys.exit(failed)


if __name__ == "__main__":
    main()
