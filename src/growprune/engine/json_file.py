"""JSON files of ours: written whole, and read with suspicion, since a disk or a person may have changed them."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from growprune.errors import GrowpruneError, shorten
from growprune.files.atomic import replacing

Kind = type | tuple[type, ...]
Names = Mapping[str, Kind]
"""What a file must have. Dots reach inside, `*` is every item, and a name with `?` may be missing or null."""

NUMBER = (int, float)
_MISSING: Any = object()


def read(path: Path, names: Names, remedy: str) -> dict[str, Any]:
    """The content of a JSON file in which some names must be.

    Raises:
        GrowpruneError: in one line, with the remedy, if it is damaged.
    """
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise GrowpruneError(f"{path} is damaged ({error}): {remedy}") from error
    if wrong := fault(content, names):
        raise GrowpruneError(f"{path} is damaged ({wrong}): {remedy}")
    return content  # type: ignore[no-any-return]


def write(path: Path, value: Any) -> None:
    """Replace a JSON file as a whole or not at all."""
    with replacing(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


def fault(content: Any, names: Names) -> str:
    """What is wrong with the content of a file, or of a line of one; nothing if it has all names.

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
    """The same with null for what is no number, or endless: JSON knows neither, though Python writes both."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def _find(content: Any, name: str) -> Iterator[Any]:
    """Every value that a name stands for, and `_MISSING` where there is none."""
    if not name:
        yield content
        return
    key, _, rest = name.partition(".")
    inside = content if isinstance(content, dict) else {}
    items: list[Any]
    if key == "*":
        items = list(inside.values()) if inside == content else content if isinstance(content, list) else [_MISSING]
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
    # true is a whole number to isinstance
    return isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)
