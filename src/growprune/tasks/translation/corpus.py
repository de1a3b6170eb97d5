"""The splits of a data folder as tokens, read once in a process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from growprune.errors import GrowpruneError, warn
from growprune.tasks.task import Split
from growprune.tasks.translation.batching import Batches, Pairs, Sentences
from growprune.tasks.translation.pieces import Pieces, learn_once
from growprune.tasks.translation.text import Lines, find_pair, read_training, read_whole


@functools.cache
def load_pieces(data: str, source: str, target: str, vocab_size: int) -> Pieces:
    """The pieces of the training text."""
    files = find_pair(data, "train", source, target)

    def lines() -> Iterator[str]:
        return itertools.chain(*_training_lines(data, source, target))

    return Pieces(learn_once(lines, vocab_size, files))


@functools.cache
def load_training(data: str, source: str, target: str, vocab_size: int, max_length: int, max_tokens: int) -> Batches:
    """The training pairs in batches, less those with more than `max_length` tokens on a side."""
    find_pair(data, "train", source, target)
    for split in ("validation", "test"):  # better to hear now of what would be missing at the end
        read_whole(data, split, source, target)
    lines = _training_lines(data, source, target)
    pairs = _encode(load_pieces(data, source, target, vocab_size), lines)
    _training_lines.cache_clear()  # the text has become tokens, and can be large
    return Batches(_without_long(pairs, max_length, data), max_tokens)


@functools.cache
def load_split(data: str, source: str, target: str, vocab_size: int, split: Split) -> tuple[Pairs, list[str]]:
    """All pairs of a split, and its target text as it is written."""
    lines = read_whole(data, split, source, target)
    return _encode(load_pieces(data, source, target, vocab_size), lines), lines[1]


@functools.cache
def _training_lines(data: str, source: str, target: str) -> Lines:
    return read_training(data, source, target)


def _encode(pieces: Pieces, lines: Lines) -> Pairs:
    source, target = lines
    return Pairs(
        Sentences.of(*pieces.encode(source, is_target=False)), Sentences.of(*pieces.encode(target, is_target=True))
    )


def _without_long(pairs: Pairs, max_length: int, data: str) -> Pairs:
    source, target = pairs.lengths()
    kept = ((source <= max_length) & (target <= max_length)).nonzero()[:, 0]
    num_long = len(pairs) - len(kept)
    if not len(kept):
        raise GrowpruneError(
            f"{data}: all {num_long} training pairs have more than {max_length} tokens: raise max_length"
        )
    if num_long:
        warn(f"{data}: left out {num_long} of {len(pairs)} training pairs, which have more than {max_length} tokens")
    return Pairs(pairs.source.subset(kept), pairs.target.subset(kept))
