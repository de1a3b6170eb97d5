"""Read and write JSON files: written atomically, and validated when read."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from growprune.errors import GrowpruneError, shorten
from growprune.files.atomic import plain_file, replacing

Kind = type | tuple[type, ...]
Names = Mapping[str, Kind]
"""Required names and types of a file. Dots name nested values, `*` is every item, and names with `?` are optional."""

NUMBER = (int, float)
_MISSING: Any = object()


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
    """Write a JSON file atomically."""
    with replacing(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


def fault(content: Any, names: Names) -> str:
    """Describe what is wrong with the content of a file, a line of it, or a state dict. Empty if nothing is.

    >>> fault({"epoch": "one"}, {"epoch": int}), fault({"epoch": 1}, {"epoch": int, "loss?": NUMBER})
    ("its epoch is 'one'", '')
    """
    for name, kind in names.items():
        for value in _find(content, name):
            if value is _MISSING:
                return f"it has no {name.replace('?', '')}"
            if not _is_of(value, kind):
                return f"its {name.replace('?', '')} is {shorten(repr(value), 100)}"
    return ""


def finite(value: Any) -> Any:
    """Replace nan and infinity by None, because JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def _find(content: Any, name: str) -> Iterator[Any]:
    """Find every value that matches a name, or `_MISSING`."""
    if not name:
        yield content
        return
    key, _, rest = name.partition(".")
    inside = content if isinstance(content, dict) else {}
    items: list[Any]
    if key == "*":
        is_listed = isinstance(content, list | tuple)
        items = [*inside.values()] if inside is content else [*content] if is_listed else [_MISSING]
    elif key.endswith("?"):
        items = [] if inside.get(key[:-1]) is None else [inside[key[:-1]]]
    else:
        items = [inside.get(key, _MISSING)]
    for item in items:
        yield from _find(item, rest)


def _is_of(value: Any, kind: Kind) -> bool:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(value, int) and abs(value) > sys.float_info.max:  # no count of ours, and nothing to reckon with
        return False
    # bool is an int to isinstance
    return isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)
