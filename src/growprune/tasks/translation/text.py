"""Parallel text, its pieces, and batches of encoded sentence pairs with a maximum number of tokens.

A split has two files with one sentence per line: line n of one translates line n of the other. The splits of a data
folder are read and encoded once per process. Byte-pair pieces are learned from the training text of both languages
together, which is deterministic.

Sentences are padded to multiples of 8 tokens. Pairs are sorted by their padded lengths and cut into batches at places
that depend only on these lengths. A seed shuffles the pairs of equal padded lengths, and the order of the batches. So
every epoch has the same number of batches of the same shapes, with other pairs in each.
"""

from __future__ import annotations

import codecs
import functools
import io
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from growprune.errors import GrowpruneError, need, warn
from growprune.tasks.bad_records import BadRecords, check_split, find
from growprune.tasks.task import Split
from growprune.tasks.translation.transformer import BOS, EOS, PAD, UNK

MULTIPLE = 8

Integers = NDArray[np.int64]
Batch = tuple[Tensor, Tensor, Tensor]
"""Sources (B, S), targets (B, 1 + T) that begin with BOS and end with EOS, and the loss scale of each example (B,)."""


@dataclass(frozen=True, eq=False)
class Sentences:
    """Sentences as tokens, all in one tensor."""

    tokens: Tensor
    starts: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, tokens: NDArray[np.int32], lengths: Integers) -> Sentences:
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
        return cls(torch.from_numpy(tokens), torch.from_numpy(starts), torch.from_numpy(lengths))

    def take(self, indices: Tensor, width: int) -> Tensor:
        """Return some sentences as (B, width), padded."""
        columns = torch.arange(width, device=indices.device)
        places = (self.starts[indices][:, None] + columns).clamp(max=len(self.tokens) - 1)
        is_padding = columns >= self.lengths[indices][:, None]
        return self.tokens[places].long().masked_fill(is_padding, PAD)


@dataclass(frozen=True, eq=False)
class Pairs:
    """Sentences and their translations."""

    source: Sentences
    target: Sentences

    def __len__(self) -> int:
        return len(self.source.lengths)

    def lengths(self) -> tuple[Tensor, Tensor]:
        """Return the numbers of tokens of the encoder and the decoder input, including one EOS or BOS."""
        return self.source.lengths, self.target.lengths - 1

    def batch(self, indices: Tensor, source_width: int, target_width: int) -> Batch:
        source = self.source.take(indices, source_width)
        target = self.target.take(indices, target_width + 1)
        num_tokens = (self.target.lengths[indices] - 1).sum()
        return source, target, (len(indices) / num_tokens).expand(len(indices))


@functools.cache
def on_device(pairs: Pairs, device: torch.device) -> Pairs:
    """Copy the pairs to the device, once."""
    sides = (pairs.source, pairs.target)
    return Pairs(*(Sentences(s.tokens.to(device), s.starts.to(device), s.lengths.to(device)) for s in sides))


class Batches:
    """The batches of an epoch.

    Args:
        max_tokens: maximum batch size times the longer of its two padded lengths. A longer pair is a batch of its
            own.
    """

    def __init__(self, pairs: Pairs, max_tokens: int) -> None:
        self.pairs = pairs
        source, target = (-(-lengths.numpy() // MULTIPLE) * MULTIPLE for lengths in pairs.lengths())
        longer = np.maximum(source, target)
        order = np.lexsort((source, target, longer))
        shapes = np.stack([longer, target, source], 1)[order]
        is_new = np.concatenate([[False], (shapes[1:] != shapes[:-1]).any(1)])
        self._group = np.empty(len(pairs), np.int32)
        self._group[order] = np.cumsum(is_new)
        source, target, longer = source[order], target[order], longer[order]
        self.cuts: list[tuple[int, int, int, int]] = []  # start and end of each batch in the sorted order, its widths
        start = 0
        while start < len(longer):  # the last pair of a batch is the longest, because `longer` never falls
            end = min(len(longer), start + max(1, max_tokens // int(longer[start])))
            end = start + max(1, min(end - start, max_tokens // int(longer[end - 1])))
            self.cuts.append((start, end, int(source[start:end].max()), int(target[start:end].max())))
            start = end

    def __len__(self) -> int:
        return len(self.cuts)

    def shuffled(self, seed: int, start: int, device: torch.device) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `start` on."""
        generator = np.random.default_rng(seed)
        order = self._sorted(generator.permutation(len(self.pairs)))
        cuts = [self.cuts[i] for i in generator.permutation(len(self.cuts))]
        return self._make(order, cuts[start:], device)

    def in_order(self, device: torch.device) -> Iterator[tuple[Tensor, Batch]]:
        """Yield every batch, shortest first, with the numbers of its pairs."""
        order = self._sorted(np.arange(len(self.pairs)))
        for (start, end, *_), batch in zip(self.cuts, self._make(order, self.cuts, device), strict=True):
            yield torch.from_numpy(order[start:end]), batch

    def _sorted(self, order: Integers) -> Integers:
        """Sort pairs by their padded lengths. Pairs of equal lengths keep their order."""
        return order[np.argsort(self._group[order], kind="stable")]

    def _make(self, order: Integers, cuts: list[tuple[int, int, int, int]], device: torch.device) -> Iterator[Batch]:
        pairs = on_device(self.pairs, device)
        places = torch.from_numpy(order).to(device)  # once, so that the host does not wait for each batch
        for start, end, *widths in cuts:
            yield pairs.batch(places[start:end], *widths)


CHUNK = 10_000


class Pieces:
    """Convert text to tokens and back.

    Args:
        model: a sentencepiece model.
    """

    def __init__(self, model: bytes) -> None:
        self.model = model
        self._processor = _sentencepiece().SentencePieceProcessor(model_proto=model)

    def __len__(self) -> int:
        return int(self._processor.vocab_size())

    def encode(self, lines: list[str], *, is_target: bool) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the tokens of all sentences, and the length of each. All end with EOS, and targets begin with BOS."""
        tokens, lengths = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
        for first in range(0, len(lines), CHUNK):  # in chunks, because lists of numbers are large
            rows = self._processor.encode(lines[first : first + CHUNK], add_bos=is_target, add_eos=True)
            lengths.append(np.array([len(row) for row in rows], np.int64))
            tokens.append(np.fromiter(itertools.chain.from_iterable(rows), np.int32, count=int(lengths[-1].sum())))
        return np.concatenate(tokens), np.concatenate(lengths)

    def decode(self, rows: list[list[int]]) -> list[str]:
        """Return plain text, without padding."""
        return list(self._processor.decode([[token for token in row if token != PAD] for row in rows]))


def learn(lines: Iterable[str], vocab_size: int) -> bytes:
    """Train a sentencepiece model of at most `vocab_size` pieces. Characters without a piece become bytes.

    The same lines always give the same bytes.
    """
    model = io.BytesIO()
    try:
        _sentencepiece().SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,  # short texts may have fewer pieces
            byte_fallback=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",  # keep the text as in the references
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            num_threads=1,  # several threads are not deterministic
            minloglevel=2,
        )
    except RuntimeError as error:
        raise GrowpruneError(
            f"sentencepiece cannot learn vocab_size={vocab_size} pieces: {error}. Try a larger vocab_size"
        ) from error
    return model.getvalue()


def _sentencepiece() -> Any:
    return need("sentencepiece", "translation", "translation needs sentencepiece")


Lines = tuple[list[str], list[str]]
"""The sentences of the source and of the target language."""

EMPTY = ("", "@@")
"""Content of lines without a sentence. Tokenizers may turn an empty line into the second."""


@functools.cache
def read(data: str, split: Split | Literal["train"], source: str, target: str) -> Lines:
    """Read the pairs of a split.

    Training pairs that cannot be read or lack a side are skipped with a warning. In evaluation, skipping one would
    change the metric, so errors are raised, and empty lines count.
    """
    layout = f"a folder with train, val (or valid) and test, each with .{source} and .{target}, one sentence to a line"
    name = {"train": "train", "validation": "val", "test": "test"}[split]
    if name == "val" and data and (Path(data) / f"valid.{source}").exists():
        name = "valid"
    paths = [find(data, f"{name}.{side}", layout=layout) for side in (source, target)]
    # Only a newline ends a line: str.splitlines would also split at other characters.
    contents = (path.read_bytes().removeprefix(codecs.BOM_UTF8) for path in paths)
    sides = [content.removesuffix(b"\n").split(b"\n") if content else [] for content in contents]
    if len(sides[0]) != len(sides[1]):
        raise GrowpruneError(
            f"{paths[0]} has {len(sides[0])} lines but {paths[1]} has {len(sides[1])}. Line n of one must be the "
            f"translation of line n of the other"
        )
    bad = BadRecords(f"{paths[0]} and {paths[1].name}", len(sides[0]))
    lines: Lines = ([], [])
    for number, pair in enumerate(zip(*sides, strict=True), 1):
        try:
            texts = [line.decode().strip() for line in pair]
        except UnicodeDecodeError as error:
            path = paths[error.object == pair[1]]
            if split != "train":
                raise GrowpruneError(
                    f"{path}: line {number} is not UTF-8. Lines of the {split} split are never skipped. Repair it"
                ) from error
            bad.skip(f"line {number}", f"{path.name} is not UTF-8")
            continue
        empty = next((path.name for path, text in zip(paths, texts, strict=True) if text in EMPTY), None)
        if split == "train" and empty is not None:
            bad.skip(f"line {number}", f"{empty} has no sentence")
            continue
        for side, text in zip(lines, texts, strict=True):
            side.append(text)
    check_split(len(lines[0]), paths[0], split)
    return lines


@functools.cache
def load_pieces(data: str, source: str, target: str, vocab_size: int) -> Pieces:
    """Learn the pieces of the training text of both languages together."""
    return Pieces(learn(itertools.chain(*read(data, "train", source, target)), vocab_size))


@functools.cache
def load_training(data: str, source: str, target: str, vocab_size: int, max_length: int, max_tokens: int) -> Batches:
    """Load the training pairs in batches, without pairs with more than `max_length` tokens on a side."""
    splits: tuple[Split, ...] = ("validation", "test")
    lines = read(data, "train", source, target)
    for split in splits:  # raise now if they are missing or damaged, not at the end
        read(data, split, source, target)
    pairs = _encode(load_pieces(data, source, target, vocab_size), lines)
    read.cache_clear()  # free the text, which can be large
    source_lengths, target_lengths = pairs.lengths()
    kept = ((source_lengths <= max_length) & (target_lengths <= max_length)).nonzero()[:, 0]
    num_long = len(pairs) - len(kept)
    if not len(kept):
        raise GrowpruneError(
            f"{data}: all {num_long} training pairs have more than {max_length} tokens. Increase max_length"
        )
    if num_long:
        warn(f"{data}: skipped {num_long} of {len(pairs)} training pairs with more than {max_length} tokens")
        pairs = Pairs(*(Sentences(s.tokens, s.starts[kept], s.lengths[kept]) for s in (pairs.source, pairs.target)))
    return Batches(pairs, max_tokens)


@functools.cache
def load_split(data: str, source: str, target: str, vocab_size: int, split: Split) -> tuple[Pairs, list[str]]:
    """Load all pairs of a split, and its target text."""
    lines = read(data, split, source, target)
    return _encode(load_pieces(data, source, target, vocab_size), lines), lines[1]


def _encode(pieces: Pieces, lines: Lines) -> Pairs:
    source, target = lines
    sides = pieces.encode(source, is_target=False), pieces.encode(target, is_target=True)
    return Pairs(*(Sentences.of(*side) for side in sides))
