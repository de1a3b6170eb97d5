"""JSON files of ours, read with suspicion: a disk, or a person, may have changed them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from growprune.errors import GrowpruneError, shorten

Kind = type | tuple[type, ...]
Names = Mapping[str, Kind]
"""What a file must have. Dots reach inside, `*` is every item, and a name with `?` may be missing or null."""

NUMBER = (int, float)
_MISSING: Any = object()


def read(
    path: Path, names: Names, remedy: str, *, upgrade: Callable[[Any], Any] = lambda content: content
) -> dict[str, Any]:
    """The content of a JSON file in which some names must be; `upgrade` makes the content of an older file a new one's.

    Raises:
        GrowpruneError: in one line, with the remedy, if it is damaged.
    """
    try:
        content = upgrade(json.loads(path.read_text()))
    except (ValueError, RecursionError) as error:
        raise GrowpruneError(f"{path} is damaged ({error}): {remedy}") from error
    for name, kind in names.items():
        for value in _find(content, name):
            if value is _MISSING:
                raise GrowpruneError(f"{path} is damaged (it has no {name.replace('?', '')}): {remedy}")
            if not _is_of(value, kind):
                wrong = f"its {name.replace('?', '')} is {shorten(repr(value), 100)}"
                raise GrowpruneError(f"{path} is damaged ({wrong}): {remedy}")
    return content  # type: ignore[no-any-return]


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
    # true is a whole number to isinstance
    return isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)
