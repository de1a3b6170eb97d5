"""How long the phases of a method are where nobody says, in comparisons and in trainers alike. Stdlib only."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

SEARCH, ROUNDS = 0.4, 2
"""The share of the training in which grow-and-prune searches, and how often it grows every part then."""
LEAST_EDITS = 40
"""A short training has at least so many edits, where its method edits every so many iterations."""


def often_enough(method: Callable[..., Any], iterations: int) -> dict[str, int]:
    """The `every` of a method that has one by default, lowered where the training would have too few edits."""
    every = inspect.signature(method).parameters.get("every")
    if every is None or not isinstance(every.default, int):
        return {}
    return {"every": max(1, min(every.default, iterations // LEAST_EDITS))}
