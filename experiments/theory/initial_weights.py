"""Does a random mask need larger initial weights? Digits, MLPs with and without normalization, 90 % sparse.

python experiments/theory/initial_weights.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from common import clock, keep, parser, table, told
from torch import Tensor, nn

import growprune as gp

MODELS = {"3 layers": (3, 256, False, 100), "6 layers": (6, 128, False, 500), "BatchNorm": (3, 256, True, 100)}
"""By name: hidden layers, their width, whether each has BatchNorm, and iterations."""
OPTIMIZERS: dict[str, Any] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
}
METHODS = ("gradual_gap", "rigl", "static_random")
SPARSITY, BATCH = 0.9, 64


def mlp(depth: int, width: int, normalized: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs in [64] + [width] * (depth - 1):
        layers += [nn.Linear(inputs, width), *([nn.BatchNorm1d(width)] if normalized else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,000 images to train on and 797 to test, another split for each seed."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 + seed))
    x, y = x[order], y[order]
    x = (x - x[:1000].mean()) / x[:1000].std()
    return x[:1000], y[:1000], x[1000:], y[1000:]


def accuracy(model: nn.Module, method: str, optimizer: Any, iterations: int, seed: int, divided: bool) -> float:
    x, y, test_x, test_y = digits(seed)
    optimizer = optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
    found = gp.sparsify(model, optimizer, method, sparsity=SPARSITY, iterations=iterations, seed=seed)
    if found.sparse.editor.rescales != divided:  # what sparsify chose is done or undone
        for weight in map(model.get_parameter, found.sparse.masks):
            density = (weight != 0).float().mean()  # of the random mask: what has grown since is zero
            weight.data.mul_(density ** (-0.5 if divided else 0.5))
    draws = torch.Generator().manual_seed(seed)
    for _ in range(iterations):
        batch = torch.randint(len(x), (BATCH,), generator=draws)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return 100 * (model.eval()(test_x).argmax(1) == test_y).float().mean().item()


def main() -> None:
    options = parser(__doc__ or "", "initial_weights")
    options.add_argument("--iterations", type=int, help="of all models; by default as many as each has")
    given, seconds, rows = options.parse_args(), clock(), []
    torch.set_num_threads(1)
    for name, (depth, width, normalized, length) in MODELS.items():
        for optimizer, make in OPTIMIZERS.items():
            for method in METHODS:
                row: dict[str, Any] = {"model": name, "optimizer": optimizer, "method": method}
                for divided in (False, True):
                    row["divided" if divided else "drawn"] = scores = []
                    for seed in range(given.seeds):
                        torch.manual_seed(seed)
                        model = mlp(depth, width, normalized)
                        scores.append(accuracy(model, method, make, given.iterations or length, seed, divided))
                rows.append(row)
                print(row, flush=True)
    print(by_model(rows))
    keep(given.out, seconds(), rows=rows)


def by_model(rows: list[dict[str, Any]]) -> str:
    """Mean test accuracy ± its standard error: a line for each model and method."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        scores = found.setdefault((row["model"], f"`{row['method']}`"), [])
        scores += [told(row["drawn"], 1), told(row["divided"], 1)]
    heads = [f"{name}, {how}" for name in OPTIMIZERS for how in ("as drawn", "divided by √d")]
    return table(["model", "method", *heads], [[*names, *scores] for names, scores in found.items()])


if __name__ == "__main__":
    main()
