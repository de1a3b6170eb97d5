"""A language model of plain text, or of tokens: a small GPT, measured in bits per byte.

The tokens of a plain text are its bytes. A `.npz` file holds the tokens of any tokenizer: `tokens` (integers, the whole
text) and `num_bytes` (for each token of the vocabulary, the number of bytes of its text).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.errors import GrowpruneError
from growprune.tasks.bad_records import find, read_arrays
from growprune.tasks.task import Split, Task, check_fields, with_channels

LAYOUT = "a text file with one byte per character, or a .npz of tokens"
BYTES = 256
"""Every byte is a token, whether the text has it or not, so that tokens do not depend on the text."""
STD = 0.02
"""Standard deviation of the GPT's initial weights, as in GPT-2."""


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
        return GPT(self)

    def narrower(self) -> Sequence[Task]:
        """Return the task with smaller `d_model`, a multiple of the same number of heads. `ffn` keeps its ratio."""
        return with_channels(self, "d_model", self.heads, "ffn")

    def example(self) -> Tensor:
        """Return a piece of `context` tokens."""
        return torch.zeros(1, self.context, dtype=torch.int64)

    def num_batches(self) -> int:
        size = len(load(self.data, self.vocab_size)[0]["train"])
        found = (size - self.context) // self.context // self.batch_size  # batches that are full at any offset
        if found < 1:
            raise GrowpruneError(
                f"{self.data} has {size} tokens for training (90 %), but a batch needs "
                f"{self.context * (self.batch_size + 1)}. Use a longer text, or lower batch_size "
                f"({self.batch_size}) or context ({self.context})"
            )
        return found

    def batches(self, *, seed: int, start: int, device: torch.device) -> Iterator[Tensor]:
        """Yield pieces with one more token, (batch_size, context + 1).

        An epoch cuts the text into pieces of equal length without overlap, from a random offset, in random order. So
        a token is at another place of its piece in each epoch. Tokens that do not fill a batch are left out.
        """
        text = on_device(self.data, "train", device, self.vocab_size)
        generator = np.random.default_rng(seed)
        offset = int(generator.integers(self.context))
        order = torch.from_numpy(generator.permutation((len(text) - 1 - offset) // self.context))
        order = order[: self.num_batches() * self.batch_size].to(device)  # once, so that the host does not wait
        for pieces in torch.split(order, self.batch_size)[start:]:
            yield _pieces(text[offset:], pieces, self.context)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean loss over all tokens. All pieces have the same length."""
        return _losses(model, batch).mean()

    def evaluate(self, model: nn.Module, split: Split, *, device: torch.device) -> dict[str, float]:
        text = on_device(self.data, split, device, self.vocab_size)
        whole, rest = divmod(len(text) - 1, self.context)
        batches = torch.split(torch.arange(whole, device=device), self.batch_size) if whole else ()
        total = torch.zeros((), dtype=torch.float64, device=device)
        for pieces in batches:
            total += _losses(model, _pieces(text, pieces, self.context)).sum()
        if rest:  # a shorter piece, so that each token except the first is predicted once
            total += _losses(model, text[None, self.context * whole :].long()).sum()
        nats = float(total) / (len(text) - 1)
        bytes_of = load(self.data, self.vocab_size)[1]
        num_bytes = int(torch.bincount(text[1:].long().cpu(), minlength=len(bytes_of)) @ bytes_of)
        bits = float(total) / num_bytes / math.log(2)
        perplexity = math.exp(nats) if nats < 709 else math.inf  # math.exp would raise
        return {"bits_per_byte": bits, "loss": nats, "perplexity": perplexity}


def _pieces(text: Tensor, numbers: Tensor, context: int) -> Tensor:
    """Return pieces of a text, (B,) -> (B, context + 1): piece n begins at n * context."""
    return text[context * numbers[:, None] + torch.arange(context + 1, device=text.device)].long()


def _losses(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the cross-entropy of each token except the first of each piece, (B, T + 1) -> (B * T,)."""
    # One row per token: cross_entropy with more dimensions is not deterministic on GPUs.
    logits = model(batch[:, :-1]).flatten(0, 1).float()
    return F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="none")


@functools.cache
def load(data: str, vocab_size: int) -> tuple[dict[str, Tensor], Tensor]:
    """Read a file. Return the tokens of each split, and the number of bytes of each token of the vocabulary."""
    path = find(data, "", layout=LAYOUT)
    if not path.is_file():
        raise GrowpruneError(f"--data must be {LAYOUT}, but {path} is a folder. Give the file itself")
    if path.suffix == ".npz":
        arrays = read_arrays(path, ("tokens", "num_bytes"))
        for name, array in arrays.items():
            if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
                raise GrowpruneError(f"{name} in {path} must be a list of integers, got {array.dtype} {array.shape}")
        tokens, num_bytes = arrays.values()
        if tokens.min() < 0 or tokens.max() >= len(num_bytes):
            raise GrowpruneError(
                f"tokens in {path} must be in [0, {len(num_bytes)}), the length of num_bytes, got {tokens.min()} to "
                f"{tokens.max()}"
            )
    else:
        tokens, num_bytes = np.frombuffer(path.read_bytes(), np.uint8), np.ones(BYTES, np.uint8)
    if len(num_bytes) != vocab_size:
        raise GrowpruneError(
            f"{path} has {len(num_bytes)} kinds of tokens, but task.vocab_size is {vocab_size}. "
            f"Use --set task.vocab_size={len(num_bytes)}"
        )
    return cut(tokens, path), torch.from_numpy(num_bytes.astype(np.int64))


def cut(tokens: NDArray[Any], source: Path | str = "the text") -> dict[str, Tensor]:
    """Cut a text into its first 90 %, the next 5 %, and the rest.

    >>> {split: len(part) for split, part in cut(np.zeros(60, np.uint8)).items()}
    {'train': 54, 'validation': 3, 'test': 3}
    """
    size = len(tokens)
    ends = (size * 90 // 100, size * 95 // 100)
    parts = {"train": tokens[: ends[0]], "validation": tokens[ends[0] : ends[1]], "test": tokens[ends[1] :]}
    if any(len(part) < 2 for part in parts.values()):  # one token to see, and one to predict
        raise GrowpruneError(f"--data must have at least 40 tokens, but {source} has {size}. Use a longer text")
    dtype = np.uint8 if tokens.dtype == np.uint8 else np.int32  # torch cannot index uint16
    return {split: torch.from_numpy(part.astype(dtype)) for split, part in parts.items()}


@functools.cache
def on_device(data: str, split: str, device: torch.device, vocab_size: int) -> Tensor:
    """Copy the tokens of a split to a device, once."""
    return load(data, vocab_size)[0][split].to(device)


class GPT(nn.Module):
    """A small GPT (Radford et al., 2019): pre-norm, learned positions, one matrix for the embedding and the output.

    Every product with a weight is a layer of its own without a bias, also q, k, v and out, so that each can become
    sparse. The shared matrix is an embedding and stays dense.

    Shapes: B pieces of T tokens, C channels in H heads of D, V the vocabulary.
    """

    def __init__(self, task: Language) -> None:
        super().__init__()
        self.embedding = Embedding(task.vocab_size, task.d_model)
        self.positions = Embedding(task.context, task.d_model)
        self.layers = nn.ModuleList(Layer(task) for _ in range(task.layers))
        self.norm = nn.LayerNorm(task.d_model)
        self.dropout = nn.Dropout(task.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, V) of the token after each of the tokens (B, T)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.positions(places))
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embedding.weight)


class Layer(nn.Module):
    """Self-attention and feed-forward, each with a norm before it and a residual connection."""

    def __init__(self, task: Language) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(task.d_model)
        self.attention = Attention(task)
        self.ffn_norm = nn.LayerNorm(task.d_model)
        self.fc1 = Linear(task.d_model, task.ffn)
        self.fc2 = Linear(task.ffn, task.d_model, std=last_std(task))
        self.dropout = nn.Dropout(task.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.fc2(F.gelu(self.fc1(self.ffn_norm(x)))))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal multi-head attention."""

    def __init__(self, task: Language) -> None:
        super().__init__()
        self.heads, self.attention_dropout = task.heads, task.dropout
        self.q, self.k, self.v = (Linear(task.d_model, task.d_model) for _ in range(3))
        self.out = Linear(task.d_model, task.d_model, std=last_std(task))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the attention output, (B, T, C) -> (B, T, C)."""
        q, k, v = (self._split(layer(x)) for layer in (self.q, self.k, self.v))
        dropout = self.attention_dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        """Split channels into heads, (B, T, C) -> (B, H, T, D)."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class Embedding(nn.Embedding):
    """An embedding with the initialisation of GPT-2."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=STD)


class Linear(nn.Linear):
    """A linear layer without a bias, with the initialisation of GPT-2."""

    def __init__(self, inputs: int, outputs: int, *, std: float = STD) -> None:
        self.std = std  # before super().__init__, which calls reset_parameters
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


def last_std(task: Language) -> float:
    """Return the standard deviation for the last layer of a residual branch. It shrinks with the number of layers."""
    return float(STD * (2 * task.layers) ** -0.5)
