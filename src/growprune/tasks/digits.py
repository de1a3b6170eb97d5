"""Handwritten digits (1,797 images of 8 x 8 pixels from scikit-learn) and a small CNN. Trains in seconds."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.errors import need
from growprune.tasks.task import Split, Task, check_fields, with_channels


@dataclass(frozen=True)
class Digits(Task):
    """Classify handwritten digits."""

    width: int = 32
    """Channels of the first convolution; the others have twice as many."""
    batch_size: int = 64
    label_smoothing: float = 0.1

    metric = "accuracy"
    initialises_modules = True

    def __post_init__(self) -> None:
        check_fields(self, least={"width": 1, "batch_size": 1}, rates=("label_smoothing",))

    def build_model(self) -> nn.Module:
        return DigitsNet(self.width)

    def narrower(self) -> Sequence[Task]:
        return with_channels(self, "width")

    def example(self) -> Tensor:
        return torch.zeros(1, 1, 8, 8)

    def num_batches(self) -> int:
        return -(-len(_load()["train"][1]) // self.batch_size)

    def batches(self, *, seed: int, start: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        images, labels = _load()["train"]
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(labels)))
        for indices in torch.split(order, self.batch_size)[start:]:
            yield images[indices].to(device), labels[indices].to(device)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels, label_smoothing=self.label_smoothing)

    def evaluate(self, model: nn.Module, split: Split, *, device: torch.device) -> dict[str, float]:
        images, labels = (tensor.to(device) for tensor in _load()[split])
        logits = model(images).float()
        correct = (logits.argmax(1) == labels).float().mean()
        return {"accuracy": 100 * float(correct), "loss": float(F.cross_entropy(logits, labels))}


class DigitsNet(nn.Module):
    """Three convolutions in two stages and a linear head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = _convolution(1, width)
        self.stage1 = _convolution(width, 2 * width)
        self.stage2 = _convolution(2 * width, 2 * width, stride=2)
        self.head = nn.Linear(2 * width * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage2(self.stage1(self.stem(x)))  # (B, 2 * width, 4, 4)
        return self.head(x.flatten(1))  # type: ignore[no-any-return]


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


@functools.cache
def _load() -> dict[str, tuple[Tensor, Tensor]]:
    """Return images in [0, 1] and labels: 1,197 for training, 200 for validation, 400 for test, always the same."""
    datasets = need("sklearn.datasets", "digits", "the task digits needs scikit-learn")
    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.from_numpy(images[order]).float().view(-1, 1, 8, 8) / 16
    y = torch.from_numpy(labels[order]).long()
    cuts = {"train": slice(0, 1197), "validation": slice(1197, 1397), "test": slice(1397, None)}
    return {name: (x[cut], y[cut]) for name, cut in cuts.items()}
