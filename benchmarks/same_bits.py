"""Do two commits train the same bits? Prints `sha256 name` for a tiny run of every method, in both storages.

    python benchmarks/same_bits.py > before.txt     # on one commit
    python benchmarks/same_bits.py > after.txt      # on another, on the same machine
    diff before.txt after.txt

Runs are those of `growprune compare` on digits, in a temporary folder; blocks of 4x1 come last, for some methods. The
digests are of each run's model.safetensors. It takes a few minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

BLOCK_METHODS = "gradual_gap,cyclic_gap,gmp,rigl,set,dpf"


def compare(out: Path, arguments: argparse.Namespace, *settings: str) -> None:
    command = [sys.executable, "-m", "growprune", "compare", "digits/dense", "--sparsities", "0.9", "--seeds", "0"]
    command += ["--epochs", str(arguments.epochs), "--workers", str(arguments.workers), "--out", str(out), *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)  # a method that refuses its storage is one of them
    if not any(out.rglob("model.safetensors")):
        raise SystemExit(f"no run of {out.name} ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="all")
    parser.add_argument("--storages", default="masked,compact,blocks", help="some of masked, compact, blocks")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    width, methods = f"task.width={arguments.width}", arguments.methods
    with tempfile.TemporaryDirectory() as folder:
        for storage in arguments.storages.split(","):
            settings = ["--methods", methods, "--set", width]
            if storage == "compact":
                settings += ["--set", "storage=compact"]
            elif storage == "blocks":
                few = BLOCK_METHODS if methods == "all" else methods
                settings = ["--methods", few, "--set", f"task.width={2 * arguments.width}", "--set", "pattern=4x1"]
            compare(Path(folder) / storage, arguments, *settings)
        for path in sorted(Path(folder).rglob("model.safetensors")):
            name = path.parent.relative_to(folder).as_posix()
            print(hashlib.sha256(path.read_bytes()).hexdigest(), name, flush=True)


if __name__ == "__main__":
    main()
