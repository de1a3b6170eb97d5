"""Replace files atomically, completely or not at all; write JSON files so, and check them when they are read."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from growprune.errors import GrowpruneError, shorten

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


Kind = type | tuple[type, ...]
Names = Mapping[str, Kind]
"""Required names and types of a file. Dots name nested values, `*` is every item, and names with `?` are optional."""

NUMBER = (int, float)


def read_json(path: Path, names: Names, remedy: str) -> dict[str, Any]:
    """Read a JSON file and check that it has all required names.

    Raises:
        GrowpruneError: if the file is damaged; it ends with the remedy.
    """
    try:
        content = json.loads(plain_file(path).read_text())
    except (ValueError, RecursionError) as error:
        raise GrowpruneError(f"{path} is damaged ({error}): {remedy}") from error
    if wrong := fault(content, names):
        raise GrowpruneError(f"{path} is damaged ({wrong}): {remedy}")
    return content  # type: ignore[no-any-return]


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically. nan and infinity become null."""
    try:
        text = json.dumps(value, indent=2, allow_nan=False)
    except ValueError:
        text = json.dumps(finite(value), indent=2, allow_nan=False)
    with replacing(path) as file:
        file.write(f"{text}\n".encode())


def fault(content: Any, names: Names) -> str:
    """Describe what is wrong with the content of a file, a line of it, or a state dict. Empty if nothing is.

    >>> fault({"epoch": "one"}, {"epoch": int}), fault({"epoch": 1}, {"epoch": int, "loss?": NUMBER})
    ("its epoch is 'one'", '')
    """
    for name, kind in names.items():
        found = [content]
        for key in name.split("."):  # go down, to all that match
            inside: list[Any] = []
            for value in found:
                if key == "*" and isinstance(value, dict):
                    inside += value.values()
                elif key == "*" and isinstance(value, list | tuple):
                    inside += value
                elif isinstance(value, dict) and value.get(key.removesuffix("?")) is not None:
                    inside.append(value[key.removesuffix("?")])
                elif isinstance(value, dict) and key in value:
                    inside.append(None)
                elif not key.endswith("?"):
                    return f"it has no {name.replace('?', '')}"
            found = inside
        kinds = kind if isinstance(kind, tuple) else (kind,)
        for value in found:
            is_bool, is_int = isinstance(value, bool), isinstance(value, int)  # bool is an int to isinstance
            is_huge = is_int and abs(value) > sys.float_info.max  # not a count of ours, and it cannot be computed with
            if not isinstance(value, kinds) or (is_bool and bool not in kinds) or is_huge:
                return f"its {name.replace('?', '')} is {shorten(repr(value), 100)}"
    return ""


def finite(value: Any) -> Any:
    """Replace nan and infinity by None, because JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


@contextlib.contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turn an OSError into one line that names the folder and says what to do."""
    try:
        yield
    except OSError as error:
        raise GrowpruneError(
            f"cannot write to {folder} ({error.strerror or error}). Check disk space and permissions, or choose "
            f"another --out"
        ) from error
