"""The link to `growprune.sharding`, which is registered here so that no lower package imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_load: Callable[[], Any] | None = None


def register(load: Callable[[], Any]) -> None:
    """Register the loader of sharding. It is loaded on first use, because FSDP2 takes a second to load."""
    global _load
    _load = load


def sharding() -> Any:
    """Return the package `growprune.sharding`."""
    assert _load is not None, "growprune/__init__.py registers it"
    return _load()
