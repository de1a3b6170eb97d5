"""Replace files atomically: completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path` only if the block succeeds and the file is safely on disk.

    A link stays, and its target is replaced. Anything but a plain file, such as a device, raises OSError.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        meant(path)
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        what = f"cannot write {path}: {error.strerror or error}; free disk space or use another path"
        raise OSError(error.errno, f"{what} (an existing file of that name is unchanged)") from error
    finally:
        with contextlib.suppress(OSError):  # it is gone if all went well, and was never there on a read-only disk
            temporary.unlink()
    sync(target.parent)


def meant(path: Path) -> Path:
    """Resolve links to the target file. Raise OSError if something other than a plain file is there."""
    with contextlib.suppress(FileNotFoundError):
        plain_file(path)
    return Path(os.path.realpath(path))


def plain_file(path: Path) -> Path:
    """Return the path of a plain file or of a link to one; else raise OSError: reading a pipe could block."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    return path


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of `replacing` that a killed process left in a folder. No process may be writing there."""
    for path in folder.glob(".*.tmp"):
        if _TEMPORARY.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)


def sync(*paths: Path) -> None:
    """Flush files to disk, and renames in folders where the system supports it, to survive a power failure."""
    for path in paths:
        if path.is_dir() and not hasattr(os, "O_DIRECTORY"):
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
