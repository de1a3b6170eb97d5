"""Arrays kept on the disk, in the user's cache folder, because reading them again from text takes minutes.

A file stands for one source of data and holds a key that says what the source looked like; if it looks different now,
the file counts for nothing. A cache that cannot be read or written is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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
    """Keep what was read from a source; whoever reads at the same time sees the old file or the new one."""
    try:
        file = _file(source)
        temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as stream:
                np.savez(stream, **{KEY: np.array(_key(source, version))}, **arrays)  # type: ignore[arg-type]
            temporary.replace(file)
        finally:
            with contextlib.suppress(OSError):  # it is gone if all went well
                temporary.unlink()
    except (OSError, RuntimeError) as error:
        log.info("what was read from %s is not cached: %s", source, error)


def _file(source: Path) -> Path:
    given = os.environ.get("XDG_CACHE_HOME")
    folder = Path(given) if given else Path.home() / ".cache"  # a RuntimeError where there is no home
    name = hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:16]
    return folder / "growprune" / f"{source.name}-{name}.npz"


def _key(source: Path, version: str) -> str:
    """Changes whenever a file of the source does: names, sizes and times of all of them."""
    files = sorted(source.rglob("*")) if source.is_dir() else [source]
    digest = hashlib.sha256(version.encode())
    for path in files:
        stat = path.stat()
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
