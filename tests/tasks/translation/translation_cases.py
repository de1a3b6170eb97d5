"""Sentences, small models and tasks for the tests of translation."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paths import SHARED
from torch import Tensor

from growprune.tasks.translation import Translation
from growprune.tasks.translation.transformer import PAD, Transformer

CPU = torch.device("cpu")
MULTI30K = SHARED / "multi30k"
EN = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
DE = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn"]


def sentences(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Numbers in English and German."""
    draw = np.random.default_rng(seed)
    rows = [draw.integers(0, 10, draw.integers(2, 13)) for _ in range(count)]
    return [(" ".join(EN[i] for i in row) + ".", " ".join(DE[i] for i in row).capitalize() + ".") for row in rows]


def write(folder: Path, name: str, pairs: list[tuple[str, str]]) -> None:
    folder.mkdir(exist_ok=True)
    for ending, lines in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
        (folder / f"{name}.{ending}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for seed, (name, count) in enumerate({"train": 60, "val": 9, "test": 11}.items()):
        write(tmp_path / "data", name, sentences(count, seed))
    return tmp_path / "data"


def tiny(data: Path | str = "", **settings: Any) -> Translation:
    sizes = {"d_model": 16, "ffn": 32, "heads": 2, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 340}
    return Translation(data=str(data), **{**sizes, **RATES, "max_tokens": 200, "max_length": 64, **settings})


def seeded(shape: Translation, seed: int = 0, *, scale: float = 1.0) -> Transformer:
    """A model in eval mode; a larger scale makes it more certain of what it says."""
    torch.manual_seed(seed)
    model = Transformer(shape).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
        model.embedding.weight.mul_(scale)
    return model


def model_of(task: Translation) -> Any:
    torch.manual_seed(0)
    return task.build_model().eval()


RATES = {"dropout": 0.0, "attention_dropout": 0.0, "relu_dropout": 0.0}
SMALL = Translation(vocab_size=11, d_model=8, ffn=12, heads=2, encoder_layers=2, decoder_layers=2, **RATES)


def tokens(*shape: int, seed: int = 0, vocab_size: int = 11) -> Tensor:
    return torch.randint(4, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def naive_losses(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    losses = torch.zeros(labels.shape)
    for place in itertools.product(*map(range, labels.shape)):
        label, num_classes = int(labels[place]), logits.shape[-1]
        if label != PAD:
            log_p = logits[place] - logits[place].exp().sum().log()
            wanted = torch.full((num_classes,), smoothing / num_classes)
            wanted[label] += 1 - smoothing
            losses[place] = -(wanted * log_p).sum()
    return losses


def rows(found: Tensor) -> list[list[int]]:
    return [[token for token in row if token != PAD] for row in found.tolist()]


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()
