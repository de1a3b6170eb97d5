"""Machine translation of plain text: a Transformer over byte-pair pieces, measured in BLEU."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.errors import GrowpruneError, need
from growprune.tasks.task import Split, Task, check_fields, with_channels
from growprune.tasks.translation.text import MULTIPLE, Batch, Batches, Pieces, load_pieces, load_split, load_training
from growprune.tasks.translation.transformer import EOS, PAD, Transformer, beam_search


@dataclass(frozen=True)
class Translation(Task):
    """Translate from one language to another.

    The defaults are those of the base Transformer. The big one has d_model 1024, ffn 4096 and 16 heads.

    `evaluate` returns `bleu` (sacreBLEU on plain text; `signature` has its settings), `loss` (per target token, without
    smoothing) and `perplexity`. Validation uses greedy decoding for speed; test uses beam search. Both use every line.
    """

    data: str = ""
    """A folder with train, val (or valid) and test in both languages: train.en, train.de, ..."""
    source: str = "en"
    target: str = "de"
    vocab_size: int = 33_712
    """Rows of the embedding, and maximum number of pieces for both languages together."""
    d_model: int = 512
    ffn: int = 2048
    heads: int = 8
    encoder_layers: int = 6
    decoder_layers: int = 6
    dropout: float = 0.1
    attention_dropout: float = 0.1
    relu_dropout: float = 0.1
    max_tokens: int = 5120
    """Maximum tokens per batch: its size times the longer of source and target length, including padding."""
    label_smoothing: float = 0.1
    max_length: int = 256
    """Maximum length. Training pairs with more tokens on a side are skipped, and translations are cut there."""
    beam: int = 4
    length_penalty: float = 1.0
    """As in fairseq, hypotheses are compared by (sum of log p) / length ** length_penalty."""
    lowercase: bool = False
    """True for uncased BLEU."""

    metric = "bleu"
    initialises_modules = True

    def __post_init__(self) -> None:
        counts = ("vocab_size", "d_model", "ffn", "heads", "encoder_layers", "decoder_layers", "max_length", "beam")
        rates = ("dropout", "attention_dropout", "relu_dropout", "label_smoothing")
        check_fields(self, least=dict.fromkeys(counts, 1), rates=rates)
        if self.d_model % self.heads or self.d_model % 2:
            raise GrowpruneError(f"d_model must be even and a multiple of heads={self.heads}, got {self.d_model}")
        longest = -(-self.max_length // MULTIPLE) * MULTIPLE
        if self.max_tokens < longest:
            raise GrowpruneError(
                f"max_tokens must be >= {longest}, so that a batch can hold a pair of max_length={self.max_length}, "
                f"got {self.max_tokens}"
            )
        if self.source == self.target:
            raise GrowpruneError(f"source and target must be different languages, got {self.source!r} for both")

    def build_model(self) -> nn.Module:
        return Transformer(self)

    def narrower(self) -> Sequence[Task]:
        """Return the task with smaller `d_model`, even multiples of the same number of heads. `ffn` keeps its ratio."""
        return with_channels(self, "d_model", math.lcm(self.heads, 2), "ffn")

    def example(self) -> tuple[Tensor, Tensor]:
        """Return a source and a target of 64 tokens each."""
        return torch.full((1, 64), EOS), torch.full((1, 64), EOS)

    def num_batches(self) -> int:
        bleu(self.target, self.lowercase)  # raise now if sacrebleu is missing, not after an epoch
        return len(self._training())

    def batches(self, *, seed: int, start: int, device: torch.device) -> Iterator[Batch]:
        return self._training().shuffled(seed, start, device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss over all target tokens of the batch."""
        source, target, scale = batch
        logits = model(source, target[:, :-1])
        losses = token_losses(logits, target[:, 1:], label_smoothing=self.label_smoothing)
        return (losses.sum(1) * scale).mean()

    def weigh(self, batch: Batch) -> Tensor:
        return (batch[1][:, 1:] != PAD).sum()

    def files(self) -> dict[str, bytes]:
        """Return the sentencepiece model, which is needed to decode translations."""
        return {"pieces.model": self._pieces().model}

    def evaluate(self, model: nn.Module, split: Split, *, device: torch.device) -> dict[str, float]:
        pairs, references = load_split(self.data, self.source, self.target, self.vocab_size, split)
        model, pieces = cast(Transformer, model), self._pieces()
        rows: list[list[int]] = [[]] * len(pairs)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for indices, (source, target, _) in Batches(pairs, self.max_tokens).in_order(device):
            total += token_losses(model(source, target[:, :-1]), target[:, 1:]).sum()
            found = beam_search(
                model,
                source,
                beam=self.beam if split == "test" else 1,
                length_penalty=self.length_penalty,
                max_length=self.max_length,
                num_pieces=len(pieces),
            )
            for index, row in zip(indices.tolist(), found.tolist(), strict=True):
                rows[index] = row
        loss = total / int(pairs.lengths()[1].sum())
        score = bleu(self.target, self.lowercase).corpus_score(pieces.decode(rows), [references]).score
        return {"bleu": score, "loss": float(loss), "perplexity": float(loss.exp())}

    @property
    def signature(self) -> str:
        counter = bleu(self.target, self.lowercase)
        counter.corpus_score([""], [[""]])  # the signature needs references
        return str(counter.get_signature())

    def _training(self) -> Batches:
        return load_training(self.data, self.source, self.target, self.vocab_size, self.max_length, self.max_tokens)

    def _pieces(self) -> Pieces:
        return load_pieces(self.data, self.source, self.target, self.vocab_size)


@functools.cache
def bleu(target: str, lowercase: bool) -> Any:
    """Return the scorer of sacreBLEU for a language. Cached, because its tokenizer may be slow to load."""
    counters = need("sacrebleu.metrics.bleu", "translation", "BLEU needs sacrebleu")
    # force: do not warn about translations that end in " ."
    try:
        return counters.BLEU(lowercase=lowercase, trg_lang=target, force=True)
    except RuntimeError as error:  # some languages need a tokenizer of their own
        raise GrowpruneError(f"BLEU for target={target!r}: {' '.join(str(error).split())}") from error


def token_losses(logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy of each token, (B, T, V) and (B, T) -> (B, T). It is 0 for padding."""
    options: dict[str, Any] = {"ignore_index": PAD, "reduction": "none", "label_smoothing": label_smoothing}
    # One row per token: cross_entropy with more dimensions is not deterministic on GPUs.
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), **options).view_as(labels)
