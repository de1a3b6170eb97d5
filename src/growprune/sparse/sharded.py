"""What sharding adds to a SparseModel: `growprune.sharding` registers itself here, and nothing below it imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_load: Callable[[], Any] | None = None


def register(load: Callable[[], Any]) -> None:
    """Say where sharding comes from; it is loaded when first needed, since FSDP2 takes a second to load."""
    global _load
    _load = load


def sharding() -> Any:
    """The package `growprune.sharding`."""
    assert _load is not None, "growprune/__init__.py registers it"
    return _load()
