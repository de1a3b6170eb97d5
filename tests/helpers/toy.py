"""A task of milliseconds, with everything that makes resuming hard: dropout, running statistics, ragged batches."""

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from growprune import engine, methods
from growprune.engine.recipe import LRSchedule, OptimizerConfig, Recipe
from growprune.masks.partition import contiguous
from growprune.tasks import Task


class NoisyNet(nn.Module):
    """Draws from all three global generators in its forward pass."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.fc2 = nn.Linear(16, 16)
        self.more = nn.Sequential(*(nn.Linear(16, 16) for _ in range(depth - 3)))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.more(self.fc2(torch.relu(self.norm(self.fc1(x)))))
        if self.training:
            x = x + 1e-3 * random.random() + 1e-3 * float(np.random.rand())  # noqa: NPY002
        return self.head(self.drop(torch.relu(x)))


@dataclass(frozen=True)
class Toy(Task):
    num_examples: int = 50
    batch_size: int = 16
    poison: int = -1
    """The number of a batch whose loss is NaN."""
    depth: int = 3
    """How many layers the model has."""
    is_plain: bool = False
    """A model that draws no random numbers and keeps no statistics, so that replicas can equal one process."""
    is_normed: bool = False
    """A plain model, but for BatchNorm."""
    pause: float = 0.0
    """Seconds to wait for each batch."""

    metric = "accuracy"

    def build_model(self) -> nn.Module:
        if self.is_normed:
            # smooth: a channel without live weights is constant, and its normalised zeros are where ReLU has its kink
            return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
        if self.is_plain:
            return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
        return NoisyNet(self.depth)

    def example(self) -> Tensor:
        return torch.zeros(1, 6)

    def num_batches(self) -> int:
        return -(-self.num_examples // self.batch_size)

    def batches(self, *, seed: int, start: int, device: torch.device) -> Iterator[Any]:
        _pass_gate()
        x, y = _data(self.num_examples)
        order = torch.from_numpy(np.random.default_rng(seed).permutation(self.num_examples))
        for number, indices in enumerate(torch.split(order, self.batch_size)):
            if number >= start:
                time.sleep(self.pause)
                yield number, x[indices].to(device), y[indices].to(device)

    def for_replica(self, index: int, count: int) -> "OneReplica":
        return OneReplica(**vars(self), index=index, count=count)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        number, x, y = batch
        loss = nn.functional.cross_entropy(model(x), y)
        return loss * float("nan") if number == self.poison else loss

    def evaluate(self, model: nn.Module, split: str, *, device: torch.device) -> dict[str, float]:
        x, y = (t.to(device) for t in _data(self.num_examples, seed={"validation": 1, "test": 2}[split]))
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
        return {"accuracy": 100 * float((logits.argmax(1) == y).float().mean()), "loss": float(loss)}


@dataclass(frozen=True)
class OneReplica(Toy):
    """The batches of a replica: the examples of others are blank."""

    index: int = 0
    count: int = 1

    def batches(self, **arguments: Any) -> Iterator[Any]:
        for number, x, y in super().batches(**arguments):
            mine = torch.arange(len(x)) % self.count == self.index
            yield number, torch.where(mine[:, None], x, 0), torch.where(mine, y, 0)


def _pass_gate() -> None:
    """Wait until there is the file that TOY_GATE names, if it names one."""
    while not Path(os.environ.get("TOY_GATE") or "/").exists():
        time.sleep(0.01)


def _data(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def cyclic() -> Recipe:
    return Recipe(
        task=Toy(),
        method=methods.cyclic_gap,
        options={"steps": 3, "epochs": 2, "finetune": 3},
        sparsity=0.8,
        parts=contiguous(3),
        keep_dense=(),
        optimizer=OptimizerConfig("sgd", lr=0.05, momentum=0.9, weight_decay=1e-4),
        lr_schedule=LRSchedule("cosine", warmup_epochs=1),
        device="cpu",
    )


def parallel() -> Recipe:
    return replace(cyclic(), method=methods.parallel_gap, options={"steps": 2, "epochs": 1, "finetune": 3})


def continuing(recipe: Recipe) -> Recipe:
    return replace(recipe, options={**recipe.options, "restart": False}, optimizer=OptimizerConfig("adamw", lr=0.01))


def plain() -> Recipe:
    return replace(cyclic(), task=Toy(is_plain=True), parts=contiguous(3))


def slow_parallel() -> Recipe:
    """Long enough to be killed many times, with a checkpoint after every iteration."""
    task = Toy(num_examples=96, pause=0.01)
    return replace(parallel(), task=task, options={"steps": 3, "epochs": 2, "finetune": 2}, checkpoint_seconds=0.0)


def stopped(recipe: Recipe, folder: Path, iterations: int) -> None:
    """Train until a signal comes after some iterations."""
    countdown = iter([False] * iterations)
    with pytest.raises(engine.Interrupted):
        engine.train(recipe, folder, should_stop=lambda: next(countdown, True))
