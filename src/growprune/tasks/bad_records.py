"""Checks of data files: report missing files, and skip unreadable records up to a limit."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from growprune.errors import GrowpruneError, warn


class BadRecords:
    """Skip bad records with a warning, and raise when there are more than `limit`.

    The first ten are reported, then every tenth up to 100, every hundredth up to 1000, and so on.

    Args:
        source: where the records are, for the message.
        num_records: total number of records; 1 % of them may be bad.
        always: number of bad records that is always allowed; 1 for evaluation data.
    """

    def __init__(self, source: Path | str, num_records: int, *, always: int = 10) -> None:
        self.source = source
        self.limit = max(always, num_records // 100)
        self._names: set[str] = set()

    def skip(self, name: str, why: object) -> None:
        """Skip a record, with a warning the first time."""
        if name in self._names:
            return
        self._names.add(name)
        count = len(self._names)
        if count > self.limit:
            raise GrowpruneError(
                f"{self.source}: {name}: {why}. This is bad record number {count}, but at most {self.limit} are "
                f"skipped. Repair or remove them"
            )
        if count % 10 ** (len(str(count - 1)) - 1) == 0:
            warn(f"{self.source}: skipped {name}: {why} ({count} so far)")


def find(root: str, relative: str, *, layout: str) -> Path:
    """Return the path of a required file or folder in the data folder. Raise if it is missing.

    Args:
        root: the data folder, as given with `--data`.
        relative: the required path inside it.
        layout: the expected layout, for the message.
    """
    if not root:
        raise GrowpruneError(f"--data is missing. Give --data DIR with {layout}")
    if not Path(root).exists():
        raise GrowpruneError(f"--data {root} does not exist. Expected {layout}")
    path = Path(root) / relative
    if not path.exists():
        raise GrowpruneError(f"{root} has no {relative}. Expected {layout}")
    return path


def check_split(num_examples: int, source: Path | str, split: str, *, layout: str = "") -> None:
    if not num_examples:
        expected = f". Expected {layout}" if layout else ""
        raise GrowpruneError(f"{source}: the {split} split has no examples{expected}")


UNREADABLE = (
    *(OSError, ValueError, EOFError, SyntaxError, RuntimeError, zipfile.BadZipFile, zlib.error, tokenize.TokenError),
    *(TypeError, KeyError),  # a file with a single array instead of several, or without one of them
)
"""Errors of numpy for a file that is damaged or not an .npz."""


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Read arrays of an .npz file."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except UNREADABLE as error:
        raise GrowpruneError(f"cannot read {path} ({error}). Expected an .npz with {', '.join(names)}") from error


def cut_validation(num_images: int, num_validation: int, data: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Split training images into those to train on and those for validation. The draw is always the same."""
    if not 0 < num_validation < num_images - 1:
        raise GrowpruneError(
            f"task.num_validation must leave at least 1 image for validation and 2 for training, got {num_validation} "
            f"of the {num_images} training images of {data}"
        )
    is_drawn = np.zeros(num_images, dtype=bool)
    is_drawn[np.random.default_rng(0).permutation(num_images)[:num_validation]] = True
    return np.flatnonzero(~is_drawn), np.flatnonzero(is_drawn)
