"""The Transformer (Vaswani et al., 2017), pre-norm, with one matrix for both embeddings and the output; beam search.

Every product with a weight is a layer of its own, also q, k, v and out, so that each can become sparse. The shared
matrix is an embedding and stays dense.

Shapes: B sentences, S source tokens, T target tokens, K hypotheses, C channels in H heads of D, V the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from growprune.tasks.translation import Translation

PAD, BOS, EOS, UNK = range(4)
"""Tokens that have no text."""


class Transformer(nn.Module):
    """Encoder and decoder. `Decoding` translates token by token."""

    def __init__(self, task: Translation) -> None:
        super().__init__()
        self.embedding = Embedding(task.vocab_size, task.d_model)
        self.encoder = Stack(task.d_model, (Layer(task, is_decoder=False) for _ in range(task.encoder_layers)))
        self.decoder = Stack(task.d_model, (Layer(task, is_decoder=True) for _ in range(task.decoder_layers)))
        self.dropout = nn.Dropout(task.dropout)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the logits (B, T, V) of the token after each token of target (B, T). Both may end in padding."""
        memory, mask = self.encode(source)
        x = self.embed(target)
        for layer in self.decoder_layers:
            x = layer(x, mask, layer.cross_attention.keys_values(memory))
        return self.logits(x)

    @property
    def decoder_layers(self) -> list[Layer]:
        return cast("list[Layer]", list(self.decoder.layers))

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the encoder output of a source (B, S, C), and the mask of tokens that are not padding (B, 1, 1, S)."""
        mask = (source != PAD)[:, None, None, :]
        x = self.embed(source)
        for layer in self.encoder.layers:
            x = layer(x, mask)
        return self.encoder.norm(x), mask

    def embed(self, tokens: Tensor, *, positions: Tensor | None = None) -> Tensor:
        """Embed tokens at the given positions; by default, at positions 0, 1, 2, ..."""
        x = self.embedding(tokens)
        if positions is None:
            positions = sinusoids(tokens.shape[1], x.shape[2], tokens.device)
        return self.dropout(x * math.sqrt(x.shape[2]) + positions)  # type: ignore[no-any-return]

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of the decoder output, (B, T, C) -> (B, T, V)."""
        return F.linear(self.decoder.norm(x), self.embedding.weight)


class Stack(nn.Module):
    """Layers, and the norm after the last one, which pre-norm layers need."""

    def __init__(self, d_model: int, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(d_model)


class Layer(nn.Module):
    """Self-attention, attention to the source in the decoder, and feed-forward.

    Each has a norm before it and a residual connection.
    """

    def __init__(self, task: Translation, *, is_decoder: bool) -> None:
        super().__init__()
        self.self_attention_norm = nn.LayerNorm(task.d_model)
        self.self_attention = Attention(task)
        if is_decoder:
            self.cross_attention_norm = nn.LayerNorm(task.d_model)
            self.cross_attention = Attention(task)
        self.ffn_norm = nn.LayerNorm(task.d_model)
        self.fc1 = Linear(task.d_model, task.ffn)
        self.fc2 = Linear(task.ffn, task.d_model)
        self.dropout = nn.Dropout(task.dropout)
        self.relu_dropout = nn.Dropout(task.relu_dropout)

    def forward(self, x: Tensor, mask: Tensor, source: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Run the layer on whole sentences (B, T, C).

        Args:
            mask: the source tokens that are not padding. A decoder also has a causal mask, which hides padding too:
                padding is at the end, where only padding attends to it.
            source: the keys and values of the source for this layer, in the decoder.
        """
        y, is_encoder = self.self_attention_norm(x), source is None
        keys_values = self.self_attention.keys_values(y)
        y = self.self_attention(y, *keys_values, mask=mask if is_encoder else None, is_causal=not is_encoder)
        return self.after_self_attention(x + self.dropout(y), mask, source)

    def after_self_attention(self, x: Tensor, mask: Tensor, source: tuple[Tensor, Tensor] | None) -> Tensor:
        """Run the rest of the layer, in which the tokens do not interact."""
        if source is not None:
            x = x + self.dropout(self.cross_attention(self.cross_attention_norm(x), *source, mask=mask))
        y = self.relu_dropout(F.relu(self.fc1(self.ffn_norm(x))))
        return x + self.dropout(self.fc2(y))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Multi-head attention. Keys and values are arguments, because decoding stores them."""

    def __init__(self, task: Translation) -> None:
        super().__init__()
        self.heads = task.heads
        self.attention_dropout = task.attention_dropout
        # Initialised as in fairseq: as one matrix with three times the outputs.
        self.q, self.k, self.v = (Linear(task.d_model, task.d_model, gain=2**-0.5) for _ in range(3))
        self.out = Linear(task.d_model, task.d_model)

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys and values: (B, S, C) -> twice (B, H, S, D)."""
        return self._split(self.k(memory)), self._split(self.v(memory))

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Return the attention output for x (B, T, C). The mask is True where attention is allowed."""
        dropout = self.attention_dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            self._split(self.q(x)), keys, values, attn_mask=mask, dropout_p=dropout, is_causal=is_causal
        )
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class Decoding:
    """Continue K hypotheses of each of B sentences token by token, and store their keys and values.

    Args:
        source: (B, S).
        beam: K, the number of hypotheses.
        max_steps: maximum number of tokens of a hypothesis.
    """

    def __init__(self, model: Transformer, source: Tensor, *, beam: int, max_steps: int) -> None:
        self.model, self.position = model, 0
        memory, self._mask = model.encode(source)
        self._sources = [layer.cross_attention.keys_values(memory) for layer in model.decoder_layers]
        self._positions = sinusoids(max_steps, memory.shape[2], memory.device)
        keys = self._sources[0][0]
        rows = len(source) * beam
        # Keys and values of each layer: (layers, 2, B * K, H, max_steps, D)
        self._past = keys.new_empty(len(self._sources), 2, rows, keys.shape[1], max_steps, keys.shape[3])

    def next(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, K, V) of the token after the newest token (B, K) of each hypothesis."""
        x = self.model.embed(tokens, positions=self._positions[self.position])
        for layer, past, source in zip(self.model.decoder_layers, self._past, self._sources, strict=True):
            y = layer.self_attention_norm(x).flatten(0, 1).unsqueeze(1)  # (B * K, 1, C)
            for kept, new in zip(past, layer.self_attention.keys_values(y), strict=True):
                kept[:, :, self.position] = new[:, :, 0]
            y = layer.self_attention(y, *past[:, :, :, : self.position + 1])
            # All hypotheses of a sentence attend to the same source, like the tokens of a target: one copy is enough.
            x = layer.after_self_attention(x + y.view_as(x), self._mask, source)
        self.position += 1
        return self.model.logits(x)

    def reorder(self, origin: Tensor) -> None:
        """Make hypothesis (b, k) continue hypothesis (b, origin[b, k])."""
        batch, beam = origin.shape
        rows = origin + beam * torch.arange(batch, device=origin.device)[:, None]
        past = self._past[..., : self.position, :]
        past.copy_(past[:, :, rows.flatten()])


class Embedding(nn.Embedding):
    """An embedding with the initialisation of fairseq."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)


class Linear(nn.Linear):
    """A linear layer with the initialisation of fairseq."""

    def __init__(self, inputs: int, outputs: int, *, gain: float = 1.0) -> None:
        self.gain = gain  # before super().__init__, which calls reset_parameters
        super().__init__(inputs, outputs)

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight, self.gain)
        nn.init.zeros_(self.bias)


def sinusoids(length: int, channels: int, device: torch.device) -> Tensor:
    """Return position embeddings (length, channels): sines in the first half of the channels, cosines in the second.

    Wavelengths go from 2 pi to 10,000 * 2 pi, as in tensor2tensor and fairseq.
    """
    half = channels // 2
    exponents = torch.arange(half, device=device) / max(1, half - 1)
    angles = torch.arange(length, device=device)[:, None] * torch.exp(-math.log(10_000) * exponents)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


LONGER = 50
"""Maximum number of tokens of a translation beyond the length of its source."""
CHECK_EVERY = 8
"""Steps between checks whether all sentences are done. For each check, the host waits for the device."""


@torch.no_grad()
def beam_search(
    model: Transformer, source: Tensor, *, beam: int, length_penalty: float, max_length: int, num_pieces: int
) -> Tensor:
    """Translate sentences (B, S), each ended by EOS, to tokens (B, T) without the ends, padded.

    It follows the rules of fairseq, like the figures that we compare with; only the maximum length of a translation
    differs. Of the 2 K best continuations, those among the first K that end are finished, and the best K that do not
    end are kept. A sentence is done when it has K finished hypotheses. The best is the one with the highest
    log-probability per token, (sum of log p) / length ** length_penalty, where the length counts the end token. Only an
    empty sentence has an empty translation. With K = 1 this is greedy search.

    Args:
        max_length: maximum number of tokens of a translation, which also has at most 50 tokens more than its source.
        num_pieces: tokens from this number on have no text and are never chosen.
    """
    lengths = (source != PAD).sum(1) - 1  # without EOS
    limits = (lengths + LONGER).clamp(max=max_length)
    max_steps = min(source.shape[1] + LONGER - 1, max_length) + 1  # known without waiting for the device
    decoding = Decoding(model, source, beam=beam, max_steps=max_steps)
    vocabulary = torch.arange(model.embedding.num_embeddings, device=source.device)
    is_end = vocabulary == EOS
    is_no_text = (vocabulary <= UNK) & ~is_end | (vocabulary >= num_pieces)
    sentences = torch.arange(len(source), device=source.device)
    # The hypotheses of each sentence: scores (B, K), tokens (B, K, T), and the newest of them (B, K).
    alive = torch.full((len(source), beam), -torch.inf, device=source.device)
    alive[:, 0] = 0.0  # the others would repeat the first
    hypotheses = torch.full((len(source), beam, max_steps), PAD, device=source.device)
    newest = torch.full((len(source), beam), BOS, device=source.device)
    # The best finished hypothesis of each sentence (B, T), its score (B,), and the number of all that are finished.
    best = hypotheses[:, 0].clone()
    best_scores = torch.full((len(source),), -torch.inf, device=source.device)
    num_finished = torch.zeros_like(best_scores)
    for step in range(max_steps):
        log_p = decoding.next(newest).float().log_softmax(2)
        must_end, must_go_on = (step >= limits)[:, None, None], (step < lengths.clamp(max=1))[:, None, None]
        is_out = is_no_text | (~is_end & must_end) | (is_end & must_go_on)
        scores, places = (alive[:, :, None] + log_p.masked_fill(is_out, -torch.inf)).flatten(1).topk(2 * beam)
        origin, tokens = places // len(vocabulary), places % len(vocabulary)  # (B, 2 K), best first

        # Store the candidates among the first K that end, if one is the best so far.
        ends = ((tokens == EOS) & scores.isfinite() & (num_finished < beam)[:, None])[:, :beam]
        score, which = torch.where(ends, scores[:, :beam] / (step + 1) ** length_penalty, -torch.inf).max(1)
        is_better = score > best_scores
        finished = hypotheses[sentences, origin.gather(1, which[:, None])[:, 0]]
        best = torch.where(is_better[:, None], finished, best)
        best_scores = torch.where(is_better, score, best_scores)
        num_finished = num_finished + ends.sum(1)

        # Keep the best K that do not end.
        alive, chosen = scores.masked_fill(tokens == EOS, -torch.inf).topk(beam)
        origin, newest = origin.gather(1, chosen), tokens.gather(1, chosen)
        hypotheses = hypotheses.gather(1, origin[:, :, None].expand_as(hypotheses))
        hypotheses[:, :, step] = newest
        if beam > 1:
            decoding.reorder(origin)
        if step % CHECK_EVERY == CHECK_EVERY - 1 and bool((num_finished >= beam).all()):
            break
    return best
