"""A language model of plain text, or of tokens: a GPT, measured in bits per byte."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.errors import GrowpruneError
from growprune.tasks.language.data import (
    BYTES,
    in_order,
    load,
    num_batches,
    num_predicted_bytes,
    on_device,
    shuffled,
)
from growprune.tasks.language.gpt import GPT, Shape
from growprune.tasks.task import Split, Task, check_fields, with_channels


@dataclass(frozen=True)
class Language(Task):
    """Predict each token of a text from the tokens before it. The tokens of a plain text are its bytes.

    The text is split by position: 90 % for training, 5 % for validation, 5 % for test. `evaluate` returns
    `bits_per_byte` (for ASCII, the bits per character of the literature), `loss` (nats per token) and `perplexity` (per
    token). A split is read in pieces of `context` tokens, and each is predicted from those before it in its piece.
    """

    data: str = ""
    """A file of text, or a .npz of tokens."""
    vocab_size: int = BYTES
    """Number of kinds of tokens."""
    context: int = 256
    """Maximum number of tokens that the model sees."""
    d_model: int = 384
    ffn: int = 1536
    heads: int = 6
    layers: int = 6
    dropout: float = 0.2
    """Dropout of the embedding, of attention, and of the output of each layer."""
    batch_size: int = 64

    metric = "bits_per_byte"
    lower_is_better = True
    initialises_modules = True

    def __post_init__(self) -> None:
        counts = ("vocab_size", "context", "d_model", "ffn", "heads", "layers", "batch_size")
        check_fields(self, least=dict.fromkeys(counts, 1), rates=("dropout",))
        if self.d_model % self.heads:
            raise GrowpruneError(f"d_model must be a multiple of heads={self.heads}, got {self.d_model}")

    def build_model(self) -> nn.Module:
        sizes = (self.context, self.d_model, self.ffn, self.heads, self.layers)
        return GPT(Shape(self.vocab_size, *sizes, self.dropout))

    def narrower(self) -> Sequence[Task]:
        """The task with smaller `d_model`, a multiple of the same number of heads. `ffn` keeps its ratio."""
        return with_channels(self, "d_model", self.heads, "ffn")

    def example(self) -> Tensor:
        """A piece of `context` tokens."""
        return torch.zeros(1, self.context, dtype=torch.int64)

    def num_batches(self) -> int:
        size = len(load(self.data, self.vocab_size)[0]["train"])
        found = num_batches(size, self.context, self.batch_size)
        if found < 1:
            raise GrowpruneError(
                f"{self.data} has {size} tokens for training (90 %), but a batch needs "
                f"{self.context * (self.batch_size + 1)}. Use a longer text, or lower batch_size "
                f"({self.batch_size}) or context ({self.context})"
            )
        return found

    def batches(self, *, seed: int, start: int, device: torch.device) -> Iterator[Tensor]:
        text = on_device(self.data, "train", device, self.vocab_size)
        return shuffled(text, self.context, self.batch_size, seed=seed, start=start)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean loss over all tokens. All pieces have the same length."""
        return _losses(model, batch).mean()

    def evaluate(self, model: nn.Module, split: Split, *, device: torch.device) -> dict[str, float]:
        text = on_device(self.data, split, device, self.vocab_size)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for batch in in_order(text, self.context, self.batch_size):
            total += _losses(model, batch).sum()
        nats = float(total) / (len(text) - 1)
        num_bytes = num_predicted_bytes(text, load(self.data, self.vocab_size)[1])
        bits = float(total) / num_bytes / math.log(2)
        perplexity = math.exp(nats) if nats < 709 else math.inf  # which math.exp raises for
        return {"bits_per_byte": bits, "loss": nats, "perplexity": perplexity}


def _losses(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the cross-entropy of each token except the first of each piece, (B, T + 1) -> (B * T,)."""
    # One row per token: cross_entropy with more dimensions is not deterministic on GPUs.
    logits = model(batch[:, :-1]).flatten(0, 1).float()
    return F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="none")
