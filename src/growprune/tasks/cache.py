"""The user's cache folder: what is slow to make again. A cache that cannot be written is as good as none."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import IO


def folder() -> Path:
    """`$XDG_CACHE_HOME/growprune`; a RuntimeError where there is neither that nor a home."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "growprune"


def write(path: Path, write_content: Callable[[IO[bytes]], object]) -> None:
    """Put a file there whole: whoever reads at the same time sees the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("xb") as stream:
            write_content(stream)
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):  # it is gone if all went well
            temporary.unlink()
