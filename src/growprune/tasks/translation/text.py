"""Parallel text: two files for each split, one sentence to a line, line n of one translated by line n of the other."""

from __future__ import annotations

import codecs
from pathlib import Path

from growprune.errors import GrowpruneError
from growprune.tasks.bad_records import BadRecords, check_split, find

Lines = tuple[list[str], list[str]]
"""The sentences of the source and of the target language."""

EMPTY = ("", "@@")
"""What a line without a sentence holds; the second is left of a sentence that a tool cut into pieces and lost."""


def read_training(data: str, source: str, target: str) -> Lines:
    """The training pairs. Those that cannot be read, or lack a side, are named and skipped."""
    paths = find_pair(data, "train", source, target)
    pairs = _read(paths)
    bad = BadRecords(f"{paths[0]} and {paths[1].name}", len(pairs))
    good: Lines = ([], [])
    for number, pair in enumerate(pairs, 1):
        why = [reason for path, line in zip(paths, pair, strict=True) if (reason := _why_bad(path, line))]
        if why:
            bad.skip(f"line {number}", why[0])
            continue
        for side, line in zip(good, pair, strict=True):
            side.append(_text(line))
    check_split(len(good[0]), paths[0], "train")
    return good


def read_whole(data: str, split: str, source: str, target: str) -> Lines:
    """All pairs of a split that is evaluated: leaving one out would change what is measured."""
    paths = find_pair(data, split, source, target)
    pairs = _read(paths)
    check_split(len(pairs), paths[0], split)
    for number, pair in enumerate(pairs, 1):
        for path, line in zip(paths, pair, strict=True):
            if not _is_text(line):
                raise GrowpruneError(
                    f"{path}: line {number} is not UTF-8; no line of the {split} split is skipped: repair it"
                )
    return [_text(line) for line, _ in pairs], [_text(line) for _, line in pairs]


def find_pair(data: str, split: str, source: str, target: str) -> tuple[Path, Path]:
    """The two files of a split; those of validation are called val or valid."""
    layout = f"a folder with train, val (or valid) and test, each with .{source} and .{target}, one sentence to a line"
    name = {"train": "train", "validation": "val", "test": "test"}[split]
    if name == "val" and data and (Path(data) / f"valid.{source}").exists():
        name = "valid"
    return find(data, f"{name}.{source}", layout=layout), find(data, f"{name}.{target}", layout=layout)


def _read(paths: tuple[Path, Path]) -> list[tuple[bytes, bytes]]:
    # Only a newline ends a line: text may hold other signs that Python takes for line breaks.
    source, target = (_lines(path.read_bytes().removeprefix(codecs.BOM_UTF8)) for path in paths)
    if len(source) != len(target):
        raise GrowpruneError(
            f"{paths[0]} has {len(source)} lines but {paths[1]} has {len(target)}; line n of one must be the "
            f"translation of line n of the other"
        )
    return list(zip(source, target, strict=True))


def _lines(content: bytes) -> list[bytes]:
    return content.removesuffix(b"\n").split(b"\n") if content else []


def _why_bad(path: Path, line: bytes) -> str | None:
    if not _is_text(line):
        return f"{path.name} is not UTF-8 there"
    text = _text(line)
    return f"{path.name} has {text!r} for a sentence" if text in EMPTY else None


def _is_text(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _text(line: bytes) -> str:
    return line.decode().strip()
