"""Parallel text: two files per split with one sentence per line, where line n of one translates line n of the other.

The splits of a data folder are read and encoded once per process.
"""

from __future__ import annotations

import codecs
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

from growprune.errors import GrowpruneError, warn
from growprune.tasks.bad_records import BadRecords, check_split, find
from growprune.tasks.task import Split
from growprune.tasks.translation.batching import Batches, Pairs, Sentences
from growprune.tasks.translation.pieces import Pieces, learn_once

Lines = tuple[list[str], list[str]]
"""The sentences of the source and of the target language."""

EMPTY = ("", "@@")
"""Content of lines without a sentence. Tokenizers may turn an empty line into the second."""


@functools.cache
def read_training(data: str, source: str, target: str) -> Lines:
    """Read the training pairs. Skip pairs that cannot be read or lack a side, with a warning."""
    paths = find_pair(data, "train", source, target)
    pairs = _read(paths)
    bad = BadRecords(f"{paths[0]} and {paths[1].name}", len(pairs))
    good: Lines = ([], [])
    for number, pair in enumerate(pairs, 1):
        try:
            sentences = [_sentence(path, line) for path, line in zip(paths, pair, strict=True)]
        except ValueError as error:
            bad.skip(f"line {number}", error)
            continue
        for side, sentence in zip(good, sentences, strict=True):
            side.append(sentence)
    check_split(len(good[0]), paths[0], "train")
    return good


def read_whole(data: str, split: str, source: str, target: str) -> Lines:
    """Read all pairs of an evaluation split. Skipping one would change the metric, so errors are raised."""
    paths = find_pair(data, split, source, target)
    pairs = _read(paths)
    check_split(len(pairs), paths[0], split)
    whole: Lines = ([], [])
    for number, pair in enumerate(pairs, 1):
        for path, line, side in zip(paths, pair, whole, strict=True):
            try:
                side.append(line.decode().strip())
            except UnicodeDecodeError as error:
                raise GrowpruneError(
                    f"{path}: line {number} is not UTF-8. Lines of the {split} split are never skipped. Repair it"
                ) from error
    return whole


def find_pair(data: str, split: str, source: str, target: str) -> tuple[Path, Path]:
    """Find the two files of a split. The validation files are called val or valid."""
    layout = f"a folder with train, val (or valid) and test, each with .{source} and .{target}, one sentence to a line"
    name = {"train": "train", "validation": "val", "test": "test"}[split]
    if name == "val" and data and (Path(data) / f"valid.{source}").exists():
        name = "valid"
    return find(data, f"{name}.{source}", layout=layout), find(data, f"{name}.{target}", layout=layout)


def _read(paths: tuple[Path, Path]) -> list[tuple[bytes, bytes]]:
    # Only a newline ends a line: str.splitlines would also split at other characters.
    texts = (path.read_bytes().removeprefix(codecs.BOM_UTF8) for path in paths)
    source, target = (text.removesuffix(b"\n").split(b"\n") if text else [] for text in texts)
    if len(source) != len(target):
        raise GrowpruneError(
            f"{paths[0]} has {len(source)} lines but {paths[1]} has {len(target)}. Line n of one must be the "
            f"translation of line n of the other"
        )
    return list(zip(source, target, strict=True))


def _sentence(path: Path, line: bytes) -> str:
    try:
        text = line.decode().strip()
    except UnicodeDecodeError as error:
        raise GrowpruneError(f"{path.name} is not UTF-8 there") from error
    if text in EMPTY:
        raise GrowpruneError(f"{path.name} has {text!r} instead of a sentence")
    return text


@functools.cache
def load_pieces(data: str, source: str, target: str, vocab_size: int) -> Pieces:
    """Learn the pieces of the training text."""
    files = find_pair(data, "train", source, target)

    def lines() -> Iterator[str]:
        return itertools.chain(*read_training(data, source, target))

    return Pieces(learn_once(lines, vocab_size, files))


@functools.cache
def load_training(data: str, source: str, target: str, vocab_size: int, max_length: int, max_tokens: int) -> Batches:
    """Load the training pairs in batches, without pairs with more than `max_length` tokens on a side."""
    find_pair(data, "train", source, target)
    for split in ("validation", "test"):  # raise now if they are missing or damaged, not at the end
        read_whole(data, split, source, target)
    lines = read_training(data, source, target)
    pairs = _encode(load_pieces(data, source, target, vocab_size), lines)
    read_training.cache_clear()  # free the text, which can be large
    source_lengths, target_lengths = pairs.lengths()
    kept = ((source_lengths <= max_length) & (target_lengths <= max_length)).nonzero()[:, 0]
    num_long = len(pairs) - len(kept)
    if not len(kept):
        raise GrowpruneError(
            f"{data}: all {num_long} training pairs have more than {max_length} tokens. Increase max_length"
        )
    if num_long:
        warn(f"{data}: skipped {num_long} of {len(pairs)} training pairs with more than {max_length} tokens")
        pairs = Pairs(pairs.source.subset(kept), pairs.target.subset(kept))
    return Batches(pairs, max_tokens)


@functools.cache
def load_split(data: str, source: str, target: str, vocab_size: int, split: Split) -> tuple[Pairs, list[str]]:
    """Load all pairs of a split, and its target text."""
    lines = read_whole(data, split, source, target)
    return _encode(load_pieces(data, source, target, vocab_size), lines), lines[1]


def _encode(pieces: Pieces, lines: Lines) -> Pairs:
    source, target = lines
    sides = pieces.encode(source, is_target=False), pieces.encode(target, is_target=True)
    return Pairs(*(Sentences.of(*side) for side in sides))
