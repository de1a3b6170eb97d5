"""Invalid settings, refused where they are made: one that slips through would train, only not as asked."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from growprune.errors import GrowpruneError


def require(holds: bool, name: str, value: object, must: str) -> None:
    if not holds:
        raise GrowpruneError(f"{name} is {value!r}, but must be {must}")


def check_choices(settings: object) -> None:
    """Raise if a field of a dataclass that is annotated `Literal[...]` holds something else: Python does not look."""
    kind: Any = type(settings)
    for name, allowed in _choices(kind).items():
        value = getattr(settings, name)
        require(value in allowed, name, value, f"one of {', '.join(map(str, allowed))}")


@cache
def _choices(kind: type[Any]) -> dict[str, tuple[Any, ...]]:
    """What the fields annotated `Literal[...]` may hold. Kept, as reading annotations is slow, and comparisons make
    thousands of recipes."""
    return {name: get_args(hint) for name, hint in get_type_hints(kind).items() if get_origin(hint) is Literal}
