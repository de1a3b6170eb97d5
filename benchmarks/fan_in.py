"""Does it pay on our CPU kernels if all rows have the same number of live weights (constant fan-in)?

    python benchmarks/fan_in.py [--threads 2] [--seconds 4] [--rounds 7] [--small]

Linear layers, float32: deployed with a random mask, and with one of equal rows, in turns.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import growprune as gp


def masked_layer(outputs: int, inputs: int, sparsity: float, *, has_equal_rows: bool) -> gp.SparseModel:
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=False)).eval()
    alive = round(inputs * (1 - sparsity))
    scores = torch.rand(outputs, inputs)
    if has_equal_rows:
        mask = torch.zeros_like(scores).scatter_(1, scores.topk(alive, 1).indices, 1.0)
    else:
        mask = torch.zeros(scores.numel()).scatter_(0, scores.view(-1).topk(outputs * alive).indices, 1.0)
    with torch.no_grad():
        model[0].weight.mul_(mask.view_as(scores))
    return gp.SparseModel.from_zeros(model)


@torch.no_grad()
def milliseconds(run: Callable[[Tensor], Tensor], x: Tensor) -> float:
    found = []
    for _ in range(30):
        start = time.perf_counter()
        run(x)
        found.append(1000 * (time.perf_counter() - start))
    return statistics.median(found)


def compare(outputs: int, inputs: int, sparsity: float, batch: int, seconds: float, rounds: int) -> tuple[float, float]:
    x = torch.randn(batch, inputs)
    models = [masked_layer(outputs, inputs, sparsity, has_equal_rows=equal) for equal in (False, True)]
    deployed = [gp.deploy(model, x, seconds=seconds) for model in models]
    times = [[milliseconds(model, x) for model in deployed] for _ in range(rounds)]
    random, equal = (statistics.median(column) for column in zip(*times, strict=True))
    return random, equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="for tuning")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="one small layer, to see that it runs")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    shapes = [(64, 48)] if arguments.small else [(2048, 512), (512, 2048), (2048, 2048)]
    batches = [1] if arguments.small else [1, 32, 128]
    print("| outputs x inputs | sparsity | batch | random, ms | constant fan-in, ms | times as fast |")
    print("|---|---|---|---|---|---|")
    for (outputs, inputs), sparsity, batch in itertools.product(shapes, (0.8, 0.9, 0.95), batches):
        random, equal = compare(outputs, inputs, sparsity, batch, arguments.seconds, arguments.rounds)
        row = f"{outputs}x{inputs} | {sparsity} | {batch} | {random:.4f} | {equal:.4f} | {random / equal:.2f}"
        print(f"| {row} |", flush=True)


if __name__ == "__main__":
    main()
