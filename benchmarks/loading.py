"""How fast each task makes its batches, against how fast it trains on them.

    python benchmarks/loading.py --data DIR     # holds cifar10.npz, multi30k/, bccd/, shapenet_part_subset.zip
    python benchmarks/loading.py --images DIR --workers 0   # class folders, as of ImageNet: the loader alone

The loader is not the bottleneck where "loading" is far below 1: what it takes of the time that a training step takes.
Streamed: the same images decoded anew for every batch, as those of ImageNet are.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from growprune.recipes import find
from growprune.recipes.classification import SMALL
from growprune.tasks.classification import Classification

DATA = {
    "classification-cifar10/dense": "cifar10.npz",
    "translation-multi30k/dense": "multi30k",
    "segmentation-subset/dense": "shapenet_part_subset.zip",
    "detection-bccd/dense": "bccd",
    "language-shakespeare/dense": "tinyshakespeare/input.txt",
}


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def batches(task: Any, device: torch.device) -> Iterator[Any]:
    """Without end."""
    for seed in range(10**6):
        yield from task.batches(seed=seed, start=0, device=device)


def examples_in(batch: Any) -> int:
    return len(batch[0])


def loading(task: Any, device: torch.device, count: int) -> tuple[float, float]:
    """(seconds a batch, examples a second) of making batches alone."""
    made = batches(task, device)
    next(made)  # reads the data
    wait()
    start = time.perf_counter()
    examples = sum(examples_in(next(made)) for _ in range(count))
    wait()
    seconds = time.perf_counter() - start
    return seconds / count, examples / seconds


def training(recipe: Any, device: torch.device, count: int) -> tuple[float, float]:
    """(seconds a batch, examples a second) of training on one batch again and again."""
    model = recipe.task.build_model().to(device)
    optimizer = recipe.optimizer.build(model)
    batch = next(recipe.task.batches(seed=0, start=0, device=device))

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
            loss = recipe.task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    wait()
    start = time.perf_counter()
    for _ in range(count):
        step()
    wait()
    seconds = (time.perf_counter() - start) / count
    return seconds, examples_in(batch) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path)
    source.add_argument("--images", type=Path)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--only", default="", help="names that contain this")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.images:
        classes = sum(path.is_dir() for path in (args.images / "train").iterdir())
        task = Classification(
            str(args.images), num_classes=classes, num_validation=1, workers=args.workers, batch_size=32
        )
        print(f"{loading(task, device, args.batches)[1]:,.0f} images/s with {args.workers} workers")
        return
    recipes = {name: (find(name), file) for name, file in DATA.items()}
    task = replace(SMALL, in_memory=False, workers=args.workers)
    streamed = replace(find("classification-cifar10/dense"), task=task)
    recipes["classification-cifar10/dense, streamed"] = streamed, "cifar10.npz"
    print("| | loading: ms a batch | examples/s | training: ms a batch | examples/s | loading / training |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, (recipe, file) in recipes.items():
        if args.only in name:
            recipe = replace(recipe, task=replace(recipe.task, data=str(args.data / file)))
            made = loading(recipe.task, device, args.batches)
            trained = training(recipe, device, args.batches)
            cells = [f"{1000 * made[0]:.2f}", f"{made[1]:,.0f}", f"{1000 * trained[0]:.2f}", f"{trained[1]:,.0f}"]
            print(f"| {name} | " + " | ".join([*cells, f"{made[0] / trained[0]:.3f}"]) + " |", flush=True)


if __name__ == "__main__":
    main()
