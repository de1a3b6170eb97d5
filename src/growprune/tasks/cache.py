"""The user's cache folder. A cache that cannot be read or written is ignored.

Each file of arrays belongs to one data source. It has a key made from the content of the source's files, or from their
names, sizes and times, and is ignored if they have changed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from growprune.files.disk import replacing


def folder() -> Path:
    """`$XDG_CACHE_HOME/growprune`. Raise RuntimeError if there is neither that nor a home folder."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "growprune"


log = logging.getLogger(__name__)

Arrays = dict[str, NDArray[np.generic]]
KEY = "key"


def load_arrays(source: Path, key: str) -> Arrays | None:
    """Load the arrays saved for a source under this key."""
    try:
        with _file(source).open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            if str(stored[KEY]) != key:
                return None
            return {name: stored[name] for name in stored.files if name != KEY}
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def save_arrays(source: Path, key: str, arrays: Arrays) -> None:
    """Save the arrays read from a source."""
    try:
        keyed: Any = {KEY: np.array(key), **arrays}
        _file(source).parent.mkdir(parents=True, exist_ok=True)
        with replacing(_file(source)) as stream:  # a concurrent reader sees the old file or the new one
            np.savez(stream, **keyed)
    except (OSError, RuntimeError) as error:
        log.info("data of %s is not cached: %s", source, error)


def _file(source: Path) -> Path:
    path = source.resolve()
    return folder() / f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.npz"


def key_of(source: Path, names: Iterable[str], version: str) -> str:
    """A key made from the names, sizes and times of a source's files, or of its zip file."""
    digest = hashlib.sha256(version.encode())
    for name in names if source.is_dir() else [""]:
        try:
            stat = (source / name).stat()
            digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        except (OSError, ValueError):  # reading it later will raise
            digest.update(f"{name}\0missing\n".encode())
    return digest.hexdigest()
