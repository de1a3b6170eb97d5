"""A language model of plain text, byte by byte: a small GPT, measured in bits per byte."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.errors import GrowpruneError
from growprune.tasks.language.data import in_order, load, num_batches, on_device, shuffled
from growprune.tasks.language.gpt import GPT, Shape
from growprune.tasks.task import Split, Task

VOCAB_SIZE = 256
"""Every byte is a token, whether the text has it or not: a model means the same without the text it learned from."""


@dataclass(frozen=True)
class Language(Task):
    """Predict each byte of a text from those before it.

    The text is cut by position: the first 90 % are trained on, the next 5 % validate, the last 5 % test. `evaluate`
    gives `bits_per_byte` (of ASCII text, the bits per character of the literature), `loss` (the same in nats) and
    `perplexity`. A split is read in pieces of `context` bytes, and each byte is predicted from those before it in its
    piece.
    """

    data: str = ""
    """A file of text."""
    context: int = 256
    """How many bytes the model sees at most."""
    d_model: int = 384
    ffn: int = 1536
    heads: int = 6
    layers: int = 6
    dropout: float = 0.2
    """Of the embedding, of attention, and of what each layer adds."""
    batch_size: int = 64

    metric = "bits_per_byte"
    lower_is_better = True
    initialises_modules = True

    def __post_init__(self) -> None:
        for name in ("context", "d_model", "ffn", "heads", "layers", "batch_size"):
            if getattr(self, name) < 1:
                raise GrowpruneError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if not 0 <= self.dropout < 1:
            raise GrowpruneError(f"dropout is {self.dropout}, but must be at least 0 and below 1")
        if self.d_model % self.heads:
            raise GrowpruneError(f"d_model is {self.d_model}, but must be a multiple of heads ({self.heads})")

    def build_model(self) -> nn.Module:
        sizes = (self.context, self.d_model, self.ffn, self.heads, self.layers)
        return GPT(Shape(VOCAB_SIZE, *sizes, self.dropout))

    def example(self) -> Tensor:
        """As many bytes as the model sees at most."""
        return torch.zeros(1, self.context, dtype=torch.int64)

    def num_batches(self) -> int:
        size = len(load(self.data)["train"])
        found = num_batches(size, self.context, self.batch_size)
        if found < 1:
            raise GrowpruneError(
                f"{self.data} has {size} bytes to train on (90 %), but a batch wants "
                f"{self.context * (self.batch_size + 1)}: give a longer text, or lower batch_size "
                f"({self.batch_size}) or context ({self.context})"
            )
        return found

    def batches(self, *, seed: int, start: int, device: torch.device) -> Iterator[Tensor]:
        text = on_device(self.data, "train", device)
        return shuffled(text, self.context, self.batch_size, seed=seed, start=start)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """The mean over all bytes; pieces have the same number of them."""
        return _losses(model, batch).mean()

    def evaluate(self, model: nn.Module, split: Split, *, device: torch.device) -> dict[str, float]:
        text = on_device(self.data, split, device)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for batch in in_order(text, self.context, self.batch_size):
            total += _losses(model, batch).sum()
        nats = float(total) / (len(text) - 1)
        return {"bits_per_byte": nats / math.log(2), "loss": nats, "perplexity": math.exp(nats)}


def _losses(model: nn.Module, batch: Tensor) -> Tensor:
    """The cross-entropy of each byte of some pieces but the first, (B, T + 1) -> (B * T,)"""
    # One row for each byte: the loss over images, which takes more axes, is not deterministic on GPUs.
    logits = model(batch[:, :-1]).flatten(0, 1).float()
    return F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="none")
