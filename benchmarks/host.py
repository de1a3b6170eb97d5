"""How long does Python take to start the work of one layer? What a GPU does meanwhile is not counted.

    python benchmarks/host.py [--layers 32] [--repeats 30] [--profile FILE] [--json FILE]

The layers are so small that a GPU is always done before the next one is started, so what is measured is the host. All
figures are medians, in microseconds a layer. `--profile` writes what Python functions took how long, for each storage.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import growprune as gp

PARTS = ("forward", "backward", "step", "zero_grad", "checkpointed forward", "checkpointed backward")


class Steps:
    """The parts of a training step of a stack of small layers."""

    def __init__(self, storage: str, num_layers: int, device: str) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(num_layers)))
            self.x = torch.randn(64, 256)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=True)
        if storage != "dense":
            self.sparse = gp.SparseModel(self.model, sparsity=0.9, storage=storage)
            self.sparse.prune()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=True)
            self.sparse.attach(self.optimizer)
        self.device = device

    def run(self) -> dict[str, float]:
        """Seconds that each part took to start."""
        found = {}
        for prefix, forward in (("", self.forward), ("checkpointed ", self.checkpointed)):
            self.wait()
            start = time.perf_counter()
            loss = forward()
            found[prefix + "forward"] = time.perf_counter() - start
            self.wait()
            found[prefix + "backward"] = seconds(loss.backward)
            self.wait()
        found["step"] = seconds(self.optimizer.step)
        self.wait()
        found["zero_grad"] = seconds(self.optimizer.zero_grad)
        return found

    def forward(self) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, cache_enabled=False):
            return self.model(self.x).sum()  # type: ignore[no-any-return]

    def checkpointed(self) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, cache_enabled=False):
            return checkpoint(self.model, self.x, use_reentrant=False, preserve_rng_state=False).sum()  # type: ignore[no-any-return]

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def profile(steps: Steps, repeats: int) -> str:
    """The 25 Python functions that took longest by themselves. The backward pass runs in this thread for it."""
    profiler, text = cProfile.Profile(), io.StringIO()
    with torch.autograd.set_multithreading_enabled(False):
        profiler.enable()
        for _ in range(repeats):
            steps.run()
        profiler.disable()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(25)
    return text.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {}
    profiles = []
    for storage in ("dense", "masked", "compact"):
        steps = Steps(storage, args.layers, device)
        for _ in range(3):
            steps.run()
        runs = [steps.run() for _ in range(args.repeats)]
        found[storage] = {part: 1e6 * statistics.median(run[part] for run in runs) / args.layers for part in PARTS}
        profiles.append(f"== {storage}\n{profile(steps, args.repeats)}" if args.profile else "")
    print("| us a layer | " + " | ".join(PARTS) + " |\n|---|" + "---:|" * len(PARTS))
    for storage, row in found.items():
        print(f"| {storage} | " + " | ".join(f"{row[part]:.1f}" for part in PARTS) + " |")
    if args.profile:
        args.profile.write_text("\n".join(profiles))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
