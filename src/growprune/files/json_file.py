"""Read and write JSON files: written atomically, and validated when read."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from growprune.errors import GrowpruneError, shorten
from growprune.files.atomic import plain_file, replacing

Kind = type | tuple[type, ...]
Names = Mapping[str, Kind]
"""Required names and types of a file. Dots name nested values, `*` is every item, and names with `?` are optional."""

NUMBER = (int, float)


def read(path: Path, names: Names, remedy: str) -> dict[str, Any]:
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


def write(path: Path, value: Any) -> None:
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
