"""How many files does one call pass through? Of growprune: files, changes from one file to another, and functions.

    python benchmarks/trace_files.py [--files] [--only NAME,...]

`--files` lists the files of each call, in the order in which they are entered. What is imported or built at first use
does not count, but for `train`, which is one command.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import itertools
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import growprune as gp
from growprune.cli import main as growprune_main

ROOT = f"{Path(gp.__file__).parent}/"


def trace(call: Callable[[], object]) -> list[tuple[str, str]]:
    """The (file, function) of each call of growprune's own functions."""
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        del arg
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and code.co_flags & inspect.CO_OPTIMIZED:
            calls.append((code.co_filename.removeprefix(ROOT), code.co_name))  # bodies of classes are not optimized

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls


def network() -> nn.Module:
    torch.manual_seed(0)
    sizes = (64, 64, 64, 64, 10)
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def sparse_model() -> gp.SparseModel:
    return gp.SparseModel(network(), sparsity=0.9)


def wrap() -> Callable[[], object]:
    sparse_model().prune()
    return sparse_model


def step(storage: str) -> Callable[[], object]:
    """A step with an edit: gradual_gap edits at each of 40 iterations here."""
    model = network()
    sparse = gp.SparseModel(model, sparsity=0.9, storage=storage, allocation="uniform")
    plan = gp.methods.gradual_gap(gp.Partition.balanced(model, 4), sparsity=0.9, iterations=40)
    optimizer = gp.Cursor(sparse, plan).attach(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    x, y = torch.randn(8, 64), torch.randint(0, 10, (8,))
    for iteration in range(9):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if iteration < 8:
            optimizer.step()
    return optimizer.step


def deploy() -> Callable[[], object]:
    sparse, x = sparse_model(), torch.randn(8, 64)
    sparse.prune()
    gp.deploy(sparse, x, seconds=0)
    return lambda: gp.deploy(sparse, x, seconds=0)


def train() -> Callable[[], object]:
    def run() -> None:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            options = ["--out", f"{folder}/run", "--set", "options.epochs=1"]
            sys.argv = ["growprune", "train", "digits/gradual-90", *options]
            with contextlib.suppress(SystemExit):
                growprune_main()

    return run


CALLS: dict[str, Callable[[], Callable[[], object]]] = {
    "SparseModel": wrap,
    "step, masked": partial(step, "masked"),
    "step, compact": partial(step, "compact"),
    "deploy": deploy,
    "train": train,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="list the files")
    parser.add_argument("--only", default="", help=f"some of {'; '.join(CALLS)}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':16}{'files':>8}{'changes of file':>18}{'functions':>12}")
    for name, prepare in CALLS.items():
        if arguments.only and name not in arguments.only.split(","):
            continue
        calls = trace(prepare())
        files = [file for file, _ in calls]
        changes = sum(a != b for a, b in itertools.pairwise(files))
        print(f"{name:16}{len(set(files)):8}{changes:18}{len(set(calls)):12}")
        if arguments.files:
            print("   ", " ".join(dict.fromkeys(files)))


if __name__ == "__main__":
    main()
