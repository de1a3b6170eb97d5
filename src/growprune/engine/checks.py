"""Invalid settings, refused where they are made: one that slips through would train, only not as asked."""

from __future__ import annotations

from typing import Literal, get_args, get_origin, get_type_hints

from growprune.errors import GrowpruneError


def require(holds: bool, name: str, value: object, must: str) -> None:
    if not holds:
        raise GrowpruneError(f"{name} is {value!r}, but must be {must}")


def check_choices(settings: object) -> None:
    """Raise if a field of a dataclass that is annotated `Literal[...]` holds something else: Python does not look."""
    for name, hint in get_type_hints(type(settings)).items():
        if get_origin(hint) is Literal:
            value, allowed = getattr(settings, name), get_args(hint)
            require(value in allowed, name, value, f"one of {', '.join(map(str, allowed))}")
