"""Two tasks with models of many layers of one size, so that a random set of layers is the same share of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import growprune as gp


@dataclass(frozen=True)
class DeepDigits(gp.tasks.Digits):
    """The digits with residual layers instead of convolutions."""

    width: int = 48
    depth: int = 8

    def build_model(self) -> nn.Module:
        return Residual(64, self.width, self.depth, 10)


class Residual(nn.Module):
    def __init__(self, inputs: int, width: int, depth: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        for block in self.blocks:
            x = x + F.relu(block(F.layer_norm(x, x.shape[1:])))
        return self.last(x)


@dataclass(frozen=True)
class Characters(gp.tasks.Task):
    """The next character of a text, by a small Transformer. The last tenth of the text is the test split."""

    data: str
    """The text file."""
    width: int = 64
    depth: int = 2
    context: int = 64
    batch_size: int = 16
    num_per_epoch: int = 20

    metric = "minus_loss"

    @cached_property
    def text(self) -> tuple[Tensor, int]:
        """Characters as numbers, and how many there are."""
        text = Path(self.data).read_text()
        known = {character: i for i, character in enumerate(sorted(set(text)))}
        return torch.tensor([known[character] for character in text]), len(known)

    def build_model(self) -> nn.Module:
        return Transformer(self.text[1], self.width, self.depth, self.context)

    def example(self) -> Tensor:
        return torch.zeros(1, self.context, dtype=torch.long)

    def num_batches(self) -> int:
        return self.num_per_epoch

    def batches(self, *, seed: int, start: int, device: torch.device) -> Iterator[Tensor]:
        text, generator = self.text[0], torch.Generator().manual_seed(seed)
        last = len(text) * 9 // 10 - self.context - 1
        places = torch.randint(last, (self.num_per_epoch, self.batch_size), generator=generator)
        for batch in places[start:]:
            yield text[batch[:, None] + torch.arange(self.context + 1)].to(device)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def evaluate(self, model: nn.Module, split: gp.tasks.Split, *, device: torch.device) -> dict[str, float]:
        held_out, size = self.text[0][len(self.text[0]) * 9 // 10 :], self.context + 1
        rows = held_out[: min(256, len(held_out) // size) * size].view(-1, size)
        loss = float(self.loss(model, rows.to(device)))
        return {"loss": loss, "minus_loss": -loss}


class Transformer(nn.Module):
    def __init__(self, num_characters: int, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(num_characters, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_characters, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T)
        x = self.characters(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # (B, T, characters)


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        h = self.norms[0](x)
        q, k, v = (
            layer(h).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))
