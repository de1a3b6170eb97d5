"""The user's cache folder: what is slow to make again. A cache that cannot be written is as good as none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from growprune.files.atomic import replacing


def folder() -> Path:
    """`$XDG_CACHE_HOME/growprune`; a RuntimeError where there is neither that nor a home."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "growprune"


def write(path: Path, write_content: Callable[[IO[bytes]], object]) -> None:
    """Put a file there whole: whoever reads at the same time sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as stream:
        write_content(stream)
