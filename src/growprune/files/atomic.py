"""Files that are replaced as a whole or not at all."""

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
    """A new file that takes the place of `path` at once, and only if the block ends well and it is safely on disk.

    A link stays, and what it means is replaced. What is not a plain file, as a device, is an OSError.
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
        what = f"cannot write {path}: {error.strerror or error}; make room or choose another folder"
        raise OSError(error.errno, f"{what} (an old file of that name is as it was)") from error
    finally:
        with contextlib.suppress(OSError):  # it is gone if all went well, and was never there on a read-only disk
            temporary.unlink()
    sync(target.parent)


def meant(path: Path) -> Path:
    """The file that a path means, through links; an OSError if there is something that is not a plain file."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "it is not a plain file, so give another name", str(path))
    return Path(os.path.realpath(path))


def remove_leftovers(folder: Path) -> None:
    """Remove the new files of `replacing` that a kill left in a folder, in which nobody writes now."""
    for path in folder.glob(".*.tmp"):
        if _TEMPORARY.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)


def sync(*paths: Path) -> None:
    """Make files, and renamings in folders where the system can open those, last through a power cut."""
    for path in paths:
        if path.is_dir() and not hasattr(os, "O_DIRECTORY"):
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
