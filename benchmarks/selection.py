"""How fast, and in how much memory, are the best 10 % of a model's weights found?

    python benchmarks/selection.py [--millions 100] [--device cuda] [--json FILE]

Compares one global magnitude threshold over many tensors with torch.nn.utils.prune.global_unstructured. Every
contender runs in a process of its own. Extra memory is the peak while it runs less what was there before it began, as a
share of the weights' bytes. There before: the weights, and for growprune its masks (a byte a weight on a CPU, a bit on
a GPU). torch makes its masks (floats) and its masked copy of the weights as it goes, so they are in its peak.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from growprune import SparseModel
from growprune.masks.patterns import chunk_elements
from growprune.masks.ranking import KeyChunks, kth_largest, magnitude_keys

SPARSITY = 0.9
SHAPES = [(64, 147), (256, 256), (512, 1024), (1024, 1024), (2048, 512), (1000, 2048)]


def make_model(millions: float, device: str) -> nn.Module:
    """60 layers of mixed size, scaled so that they hold the wanted number of weights in all."""
    torch.manual_seed(0)
    shapes = [SHAPES[i % len(SHAPES)] for i in range(60)]
    scale = (millions * 1e6 / sum(rows * columns for rows, columns in shapes)) ** 0.5
    sizes = [(max(1, round(rows * scale)), max(1, round(columns * scale))) for rows, columns in shapes]
    model = nn.ModuleList(nn.Linear(columns, rows, bias=False, device=device) for rows, columns in sizes)
    for layer in model:
        nn.init.normal_(layer.weight)
    return model


def num_kept(model: nn.Module) -> int:
    return round((1 - SPARSITY) * sum(p.numel() for p in model.parameters()))


def keys_of(weight: Tensor) -> KeyChunks:
    def chunks() -> Iterator[Tensor]:
        for chunk in weight.detach().view(-1).split(chunk_elements(weight.device)):  # type: ignore[no-untyped-call]
            yield magnitude_keys(chunk)

    return chunks


def find_threshold(model: nn.Module) -> Callable[[], object]:
    """Only the threshold: kth_largest over all weights."""
    sources = [keys_of(weight) for weight in model.parameters()]
    digit_bits = 11 if next(model.parameters()).is_cuda else 16  # as choose() has it
    return lambda: kth_largest(sources, num_kept(model), digit_bits=digit_bits)


def prune_sparse_model(model: nn.Module) -> Callable[[], object]:
    """The public call: threshold, masks, and zeros in the weights. The masks exist before, all alive."""
    sparse = SparseModel(model, sparsity=SPARSITY, allocation="global")
    return sparse.prune


def prune_with_torch(model: nn.Module) -> Callable[[], object]:
    layers = [(layer, "weight") for layer in model.children()]
    return lambda: prune.global_unstructured(layers, prune.L1Unstructured, amount=SPARSITY)


CONTENDERS = {
    "growprune, threshold": find_threshold,
    "growprune, prune()": prune_sparse_model,
    "torch global_unstructured": prune_with_torch,
}


def measure(name: str, millions: float, device: str) -> dict[str, float]:
    CONTENDERS[name](make_model(millions if device == "cuda" else 1, device))()  # a GPU loads kernels when first used
    model = make_model(millions, device)
    work = CONTENDERS[name](model)
    before = reset_peak(device)
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else resident("VmHWM")
    weights = sum(p.numel() for p in model.parameters())
    return {"seconds": seconds, "extra_bytes": peak - before, "weights": weights}


def reset_peak(device: str) -> int:
    """Start measuring the peak anew; returns the bytes held now."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def measure_apart(name: str, args: argparse.Namespace) -> dict[str, float]:
    """Measure in fresh processes; the median time and the largest memory of them."""
    command = [sys.executable, __file__, "--one", name, "--millions", str(args.millions), "--device", args.device]
    runs = [json.loads(subprocess.check_output(command, env=os.environ)) for _ in range(args.repeats)]
    return {
        "seconds": statistics.median(run["seconds"] for run in runs),
        "extra_bytes": max(run["extra_bytes"] for run in runs),
        "weights": runs[0]["weights"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=100)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.millions, args.device)))
        return
    results = {name: measure_apart(name, args) for name in CONTENDERS}
    slowest = results["torch global_unstructured"]["seconds"]
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{results['growprune, prune()']['weights'] / 1e6:.0f} M float32 weights in 60 tensors, {where}")
    print(f"{'':28}{'seconds':>9}{'speed-up':>10}{'extra memory':>14}")
    for name, result in results.items():
        extra = 100 * result["extra_bytes"] / (4 * result["weights"])
        ratio = f"{slowest / result['seconds']:.1f}x"
        print(f"{name:28}{result['seconds']:>9.4f}{ratio:>10}{extra:>12.1f} %")
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "device": where, "results": results}, indent=1))


if __name__ == "__main__":
    main()
