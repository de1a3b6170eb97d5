"""What do masks cost while training? A masked step against the dense step of the same model.

    python benchmarks/masking.py [--device cuda] [--steps 50] [--sparsity 0.9] [--small] [--json FILE]

Both models see the same batch, in turns, in the same process; the figures are medians. Masked storage keeps dense
tensors, so it cannot be faster than dense: the question is how little slower it is.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from growprune.sparse.model import SparseModel


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def cnn(device: str, is_small: bool) -> tuple[nn.Module, Tensor]:
    """A ResNet of 12 blocks for small images."""
    widths = [64, 128, 256] if not is_small else [4, 4, 8]
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, padding=1, bias=False)]
    for before, width in zip([widths[0], *widths], widths, strict=False):
        layers += [nn.Conv2d(before, width, 1, stride=1 + (before != width)), *(Residual(width) for _ in range(4))]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
    return model, torch.randn(256 if device == "cuda" else 16 if not is_small else 2, 3, 32, 32)


def transformer(device: str, is_small: bool) -> tuple[nn.Module, Tensor]:
    """Six encoder layers of width 512."""
    width = 512 if not is_small else 16
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 6), nn.Flatten(), nn.LazyLinear(10))
    batch = torch.randn(64 if device == "cuda" else 4, 64, width)
    model(batch[:1])  # gives the lazy layer its size
    return model, batch


MODELS: dict[str, Callable[[str, bool], tuple[nn.Module, Tensor]]] = {"cnn": cnn, "transformer": transformer}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
    "adamw fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
}


def compare(model_name: str, optimizer_name: str, args: argparse.Namespace) -> dict[str, float]:
    torch.manual_seed(0)
    dense, batch = MODELS[model_name](args.device, args.small)
    dense, batch = dense.to(args.device), batch.to(args.device)
    sparse = SparseModel(copy.deepcopy(dense), sparsity=args.sparsity)
    sparse.prune()
    steps = {
        "dense": step_of(dense, OPTIMIZERS[optimizer_name](dense), batch),
        "masked": step_of(sparse.model, sparse.attach(OPTIMIZERS[optimizer_name](sparse.model)), batch),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(args.steps + 3):
        for name in sorted(steps, reverse=number % 2 == 1):  # in turns, and neither always first
            taken = time_of(steps[name], args.device)
            if number >= 3:
                seconds[name].append(taken)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    # a ratio of neighbours, so that a machine that slows down slows both
    ratio = statistics.median(m / d for m, d in zip(seconds["masked"], seconds["dense"], strict=True))
    return {**medians, "ratio": ratio, "weights": sparse.num_prunable}


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Callable[[], None]:
    target = torch.zeros(len(batch), dtype=torch.long, device=batch.device)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), target).backward()
        optimizer.step()

    return step


def time_of(step: Callable[[], None], device: str) -> float:
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--small", action="store_true", help="models so small that only Python is measured")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"sparsity {args.sparsity}, {where}, median of {args.steps} steps")
    print(f"{'':25}{'weights':>9}{'dense':>12}{'masked':>12}{'masked/dense':>14}")
    results = {}
    for model in MODELS:
        for optimizer in OPTIMIZERS:
            result = results[f"{model}, {optimizer}"] = compare(model, optimizer, args)
            times = f"{1000 * result['dense']:>9.2f} ms{1000 * result['masked']:>9.2f} ms{result['ratio']:>14.3f}"
            print(f"{model + ', ' + optimizer:25}{result['weights'] / 1e6:>7.1f} M{times}")
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "device": where, "results": results}, indent=1))


if __name__ == "__main__":
    main()
