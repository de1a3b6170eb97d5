"""Encoded sentence pairs, and batches of them with a maximum number of tokens.

Sentences are padded to multiples of 8 tokens. Pairs are sorted by their padded lengths and cut into batches at places
that depend only on these lengths. A seed shuffles the pairs of equal padded lengths, and the order of the batches. So
every epoch has the same number of batches of the same shapes, with other pairs in each.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from growprune.tasks.translation.transformer import PAD

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

    def subset(self, kept: Tensor) -> Sentences:
        return Sentences(self.tokens, self.starts[kept], self.lengths[kept])

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


@dataclass(frozen=True)
class Cut:
    """The place of a batch in the sorted order, and its padded lengths."""

    start: int
    end: int
    source_width: int
    target_width: int


class Batches:
    """The batches of an epoch.

    Args:
        max_tokens: maximum batch size times the longer of its two padded lengths. A longer pair is a batch of its
            own.
    """

    def __init__(self, pairs: Pairs, max_tokens: int) -> None:
        self.pairs = pairs
        source, target = (_padded(lengths.numpy()) for lengths in pairs.lengths())
        longer = np.maximum(source, target)
        order = np.lexsort((source, target, longer))
        shapes = np.stack([longer, target, source], 1)[order]
        is_new = np.concatenate([[False], (shapes[1:] != shapes[:-1]).any(1)])
        self._group = np.empty(len(pairs), np.int32)
        self._group[order] = np.cumsum(is_new)
        self.cuts = list(_cut(source[order], target[order], longer[order], max_tokens))

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
        for cut, batch in zip(self.cuts, self._make(order, self.cuts, device), strict=True):
            yield torch.from_numpy(order[cut.start : cut.end]), batch

    def _sorted(self, order: Integers) -> Integers:
        """Sort pairs by their padded lengths. Pairs of equal lengths keep their order."""
        return order[np.argsort(self._group[order], kind="stable")]

    def _make(self, order: Integers, cuts: list[Cut], device: torch.device) -> Iterator[Batch]:
        pairs = on_device(self.pairs, device)
        places = torch.from_numpy(order).to(device)  # once, so that the host does not wait for each batch
        for cut in cuts:
            yield pairs.batch(places[cut.start : cut.end], cut.source_width, cut.target_width)


def _padded(lengths: Integers) -> Integers:
    return -(-lengths // MULTIPLE) * MULTIPLE


def _cut(source: Integers, target: Integers, longer: Integers, max_tokens: int) -> Iterator[Cut]:
    """Cut sorted pairs into batches. The last pair of a batch is the longest, because `longer` never falls."""
    start = 0
    while start < len(longer):
        end = min(len(longer), start + max(1, max_tokens // int(longer[start])))
        end = start + max(1, min(end - start, max_tokens // int(longer[end - 1])))
        yield Cut(start, end, int(source[start:end].max()), int(target[start:end].max()))
        start = end
