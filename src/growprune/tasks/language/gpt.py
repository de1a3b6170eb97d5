"""A small GPT (Radford et al., 2019): pre-norm, learned positions, and one matrix for the embedding and the output.

Every product with a weight is a layer of its own without a bias, also q, k, v and out, so that each can become sparse.
The shared matrix is an embedding and stays dense. Weights are initialised as in GPT-2.

Shapes: B pieces of T tokens, C channels in H heads of D, V the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STD = 0.02
"""Standard deviation of initial weights."""


@dataclass(frozen=True)
class Shape:
    """The sizes and the dropout rate of a GPT."""

    vocab_size: int
    context: int
    d_model: int
    ffn: int
    heads: int
    layers: int
    dropout: float = 0.0


class GPT(nn.Module):
    """Predicts the token after each token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = Embedding(shape.vocab_size, shape.d_model)
        self.positions = Embedding(shape.context, shape.d_model)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.d_model)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, V) of the token after each of the tokens (B, T)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.positions(places))
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embedding.weight)


class Layer(nn.Module):
    """Self-attention and feed-forward, each with a norm before it and a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.d_model)
        self.attention = Attention(shape)
        self.ffn_norm = nn.LayerNorm(shape.d_model)
        self.fc1 = Linear(shape.d_model, shape.ffn)
        self.fc2 = Linear(shape.ffn, shape.d_model, std=last_std(shape))
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.fc2(F.gelu(self.fc1(self.ffn_norm(x)))))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal multi-head attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.attention_dropout = shape.heads, shape.dropout
        self.q, self.k, self.v = (Linear(shape.d_model, shape.d_model) for _ in range(3))
        self.out = Linear(shape.d_model, shape.d_model, std=last_std(shape))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        q, k, v = (self._split(layer(x)) for layer in (self.q, self.k, self.v))
        dropout = self.attention_dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, H, T, D)"""
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


def last_std(shape: Shape) -> float:
    """Return the standard deviation for the last layer of a residual branch. It shrinks with the number of layers."""
    return float(STD * (2 * shape.layers) ** -0.5)
