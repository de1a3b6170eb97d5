"""How long a sparse file takes to load, beside the dense file of the same model. python benchmarks/loading_files.py

Linear layers of 100 M weights in all, new weights pruned by magnitude. Files are in the page cache, and are loaded in
turn; the fastest of all rounds is shown, as ratios to loading the dense file into memory that is there already, and
into memory that is made while it is loaded, as "new" says. `assign` copies nothing and reads nothing yet; "and read"
then adds all of it up once. A cold file is one that the kernel was asked to forget, which some disks do not notice.
With --fresh each load is the only one of a process, which is what a program that starts sees: memory is new then.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, load_model, save_file
from torch import nn

import growprune as gp
from growprune.files.reader import open_sparse

FORMS = [(0.9, "unstructured"), (0.9, "1x8"), (0.95, "unstructured")]
DENSE, DENSE_NEW = "dense: load_model", "dense: to_empty, load_model, new"
Case = Callable[[], Callable[[], object]]
"""Prepares, and returns what is timed."""


def build(millions: int) -> nn.Module:
    shapes = [(1024, 4096), (4096, 1024)] * max(1, millions // 8)
    return nn.Sequential(*(nn.Linear(*shape) for shape in shapes))


def build_empty(millions: int) -> nn.Module:
    with torch.device("meta"):
        return build(millions)


def cases(dense: Path, ours: Path, millions: int, model: nn.Module) -> dict[str, Case]:
    def check() -> object:
        with open_sparse(ours) as file:
            return file.everything()

    def into_new(load: Callable[[nn.Module], object]) -> Case:
        def prepared() -> Callable[[], object]:
            empty = build_empty(millions)
            return lambda: load(empty)

        return prepared

    def fill_new(empty: nn.Module) -> object:
        return load_model(empty.to_empty(device="cpu"), dense)

    def read_all(empty: nn.Module) -> object:
        empty.load_state_dict(load_file(dense), assign=True)
        return sum(float(parameter.detach().sum()) for parameter in empty.parameters())

    return {
        DENSE: lambda: lambda: load_model(model, dense),
        "dense: load_file, load_state_dict": lambda: lambda: model.load_state_dict(load_file(dense)),
        DENSE_NEW: into_new(fill_new),
        "dense: load_file, assign": into_new(lambda empty: empty.load_state_dict(load_file(dense), assign=True)),
        "dense: load_file, assign, and read": into_new(read_all),
        "sparse: values and bits, checked": lambda: check,
        "sparse: load, compact, new": into_new(lambda empty: gp.load(ours, empty, storage="compact")),
        "sparse: load, compact, mapped, new": into_new(lambda e: gp.load(ours, e, storage="compact", mapped=True)),
        "sparse: deploy, new": into_new(lambda empty: gp.deploy(ours, torch.zeros(1, 1024), into=empty, seconds=0)),
        "sparse: load, masked": lambda: lambda: gp.load(ours, model),
        "sparse: load, masked, new": into_new(lambda empty: gp.load(ours, empty)),
        "sparse: read, dense, new": lambda: lambda: gp.read(ours),
    }


def seconds(case: Case, *, forget: list[Path]) -> float:
    run = case()
    for path in forget:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    kept = run()
    elapsed = time.perf_counter() - start
    del kept
    return elapsed


def fresh_seconds(name: str, dense: Path, ours: Path, arguments: argparse.Namespace) -> float:
    """The same in a process of its own."""
    options = ["--millions", str(arguments.millions), "--threads", str(arguments.threads)]
    command = [sys.executable, __file__, *options, "--one", name, str(dense), str(ours)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def show(measures: dict[str, Callable[[], float]], rounds: int) -> None:
    times: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            times[name].append(measure())
    best = {name: min(taken) for name, taken in times.items()}
    for name, taken in times.items():
        ratios = f"{best[name] / best[DENSE]:7.2f}x {best[name] / best[DENSE_NEW]:7.2f}x"
        print(f"    {name:36s}{best[name] * 1e3:8.1f} ms {ratios}  (median {statistics.median(taken) * 1e3:.1f} ms)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cold", action="store_true", help="also with files that are not in the page cache")
    parser.add_argument("--fresh", action="store_true", help="also each load in a process of its own")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--one", nargs=3, metavar=("CASE", "DENSE", "OURS"), help="of --fresh: what one process does")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.one:
        name, dense, ours = arguments.one
        model = build(arguments.millions) if "new" not in name else build_empty(arguments.millions)
        print(seconds(cases(Path(dense), Path(ours), arguments.millions, model)[name], forget=[]))
        return
    with tempfile.TemporaryDirectory() as folder:
        dense, ours = Path(folder) / "dense.safetensors", Path(folder) / "sparse.safetensors"
        for sparsity, pattern in FORMS:
            model = build(arguments.millions)
            sparse = gp.SparseModel(model, sparsity=sparsity, pattern=pattern)
            sparse.prune()
            gp.save(sparse, ours)
            save_file(model.state_dict(), dense)
            del sparse
            size = ours.stat().st_size / dense.stat().st_size
            about = gp.manifest(ours)
            weights = f"{about['totals']['elements'] / 1e6:.0f} M weights, version {about['version']}"
            print(f"{sparsity:.0%}, {pattern}: {size:.4f} of the dense bytes, {weights}; ratios to dense, dense new")
            all_cases = cases(dense, ours, arguments.millions, model)
            few = max(1, arguments.rounds // 3)
            show({name: partial(seconds, case, forget=[]) for name, case in all_cases.items()}, arguments.rounds)
            if arguments.cold:
                print("  not in the page cache:")
                show({name: partial(seconds, case, forget=[dense, ours]) for name, case in all_cases.items()}, few)
            if arguments.fresh:
                print("  in a process of its own:")
                show({name: partial(fresh_seconds, name, dense, ours, arguments) for name in all_cases}, few)


if __name__ == "__main__":
    main()
