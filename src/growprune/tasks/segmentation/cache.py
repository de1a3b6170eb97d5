"""Arrays kept on the disk, in the user's cache folder, because reading them again from text takes minutes.

A file stands for one source of data and holds a key that says what the source looked like; if it looks different now,
the file counts for nothing. A cache that cannot be read or written is as good as none.
"""

from __future__ import annotations

import hashlib
import logging
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from growprune.tasks import cache

log = logging.getLogger(__name__)

Arrays = dict[str, NDArray[np.generic]]
KEY = "key"


def load(source: Path, version: str) -> Arrays | None:
    """What was saved for a source that is still as it was then."""
    try:
        with _file(source).open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            if str(stored[KEY]) != _key(source, version):
                return None
            return {name: stored[name] for name in stored.files if name != KEY}
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def save(source: Path, version: str, arrays: Arrays) -> None:
    """Keep what was read from a source."""
    try:
        keyed: Any = {KEY: np.array(_key(source, version)), **arrays}
        cache.write(_file(source), lambda stream: np.savez(stream, **keyed))
    except (OSError, RuntimeError) as error:
        log.info("what was read from %s is not cached: %s", source, error)


def _file(source: Path) -> Path:
    name = hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:16]
    return cache.folder() / f"{source.name}-{name}.npz"


def _key(source: Path, version: str) -> str:
    """Changes whenever a file of the source does: names, sizes and times of all of them."""
    files = sorted(source.rglob("*")) if source.is_dir() else [source]
    digest = hashlib.sha256(version.encode())
    for path in files:
        stat = path.stat()
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
