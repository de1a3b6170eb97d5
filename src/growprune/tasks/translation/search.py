"""Beam search for many sentences at a time, on the device.

It follows the rules of fairseq, like the figures that we compare with. Only the maximum length of a translation
differs: here it depends on the source. Of the 2 K best continuations, those among the first K that end are finished,
and the best K that do not end are kept. A sentence is done when it has K finished hypotheses. The best is the one with
the highest log-probability per token, (sum of log p) / length ** length_penalty, where the length counts the end token.
Only an empty sentence has an empty translation. With K = 1 this is greedy search.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from growprune.tasks.translation.transformer import BOS, EOS, PAD, UNK, Decoding, Transformer

LONGER = 50
"""Maximum number of tokens of a translation beyond the length of its source."""
CHECK_EVERY = 8
"""Steps between checks whether all sentences are done. For each check, the host waits for the device."""


@torch.no_grad()
def beam_search(
    model: Transformer, source: Tensor, *, beam: int, length_penalty: float, max_length: int, num_pieces: int
) -> Tensor:
    """Translate sentences (B, S), each ended by EOS, to tokens (B, T) without the ends, padded.

    Args:
        max_length: maximum number of tokens of a translation, which also has at most 50 tokens more than its source.
        num_pieces: tokens from this number on have no text and are never chosen.
    """
    lengths = (source != PAD).sum(1) - 1  # without EOS
    limits = (lengths + LONGER).clamp(max=max_length)
    max_steps = min(source.shape[1] + LONGER - 1, max_length) + 1  # known without waiting for the device
    decoding = Decoding(model, source, beam=beam, max_steps=max_steps)
    tokens = torch.arange(model.embedding.num_embeddings, device=source.device)
    is_end = tokens == EOS
    is_no_text = (tokens <= UNK) & ~is_end | (tokens >= num_pieces)
    beams = Beams.start(len(source), beam, max_steps, source.device)
    for step in range(max_steps):
        log_p = decoding.next(beams.newest).float().log_softmax(2)
        must_end, must_go_on = (step >= limits)[:, None, None], (step < lengths.clamp(max=1))[:, None, None]
        is_out = is_no_text | (~is_end & must_end) | (is_end & must_go_on)
        candidates = best_candidates(beams.scores, log_p.masked_fill(is_out, -torch.inf))
        beams.finish(*candidates, step=step, length_penalty=length_penalty)
        origin = beams.advance(*candidates, step=step)
        if beam > 1:
            decoding.reorder(origin)
        if step % CHECK_EVERY == CHECK_EVERY - 1 and bool(beams.is_done().all()):
            break
    return beams.best


def best_candidates(scores: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best 2 K continuations, best first: scores, the hypotheses that they continue, tokens (B, 2 K)."""
    beam, vocab_size = log_p.shape[1:]
    best, places = (scores[:, :, None] + log_p).flatten(1).topk(2 * beam)
    return best, places // vocab_size, places % vocab_size


@dataclass
class Beams:
    """The hypotheses of each sentence, and the best finished one."""

    scores: Tensor  # (B, K)
    tokens: Tensor  # (B, K, T)
    newest: Tensor  # (B, K)
    best: Tensor  # (B, T)
    best_scores: Tensor  # (B,)
    num_finished: Tensor  # (B,)

    @classmethod
    def start(cls, batch: int, beam: int, max_steps: int, device: torch.device) -> Beams:
        scores = torch.full((batch, beam), -torch.inf, device=device)
        scores[:, 0] = 0.0  # the others would repeat the first
        tokens = torch.full((batch, beam, max_steps), PAD, device=device)
        newest = torch.full((batch, beam), BOS, device=device)
        worst = torch.full((batch,), -torch.inf, device=device)
        return cls(scores, tokens, newest, tokens[:, 0].clone(), worst, torch.zeros_like(worst))

    def is_done(self) -> Tensor:
        return self.num_finished >= self.scores.shape[1]

    def finish(self, scores: Tensor, origin: Tensor, tokens: Tensor, *, step: int, length_penalty: float) -> None:
        """Store the candidates among the first K that end, if one is the best so far."""
        beam = self.scores.shape[1]
        ends = (tokens == EOS) & scores.isfinite() & ~self.is_done()[:, None]
        finished = torch.where(ends, scores / (step + 1) ** length_penalty, -torch.inf)[:, :beam]
        score, which = finished.max(1)
        hypothesis = self.tokens[torch.arange(len(which), device=which.device), origin.gather(1, which[:, None])[:, 0]]
        is_better = score > self.best_scores
        self.best = torch.where(is_better[:, None], hypothesis, self.best)
        self.best_scores = torch.where(is_better, score, self.best_scores)
        self.num_finished = self.num_finished + ends[:, :beam].sum(1)

    def advance(self, scores: Tensor, origin: Tensor, tokens: Tensor, *, step: int) -> Tensor:
        """Keep the best K candidates that do not end, and return the hypotheses they continue (B, K)."""
        beam = self.scores.shape[1]
        self.scores, chosen = scores.masked_fill(tokens == EOS, -torch.inf).topk(beam)
        origin, self.newest = origin.gather(1, chosen), tokens.gather(1, chosen)
        self.tokens = self.tokens.gather(1, origin[:, :, None].expand_as(self.tokens))
        self.tokens[:, :, step] = self.newest
        return origin
