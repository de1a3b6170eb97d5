"""One piece of memory for all stored values: those that are not needed at the same time share their places."""

from __future__ import annotations

from collections.abc import Sequence

from growprune.deployment.steps import Step, Stored, leaves

ALIGNMENT = 16
"""Floats: buffers begin where cache lines do."""


def lifetimes(steps: Sequence[Step], num_buffers: int, kept: Sequence[object]) -> list[tuple[int, int]]:
    """By buffer, the first and the last step that touches it. What is `kept` is read after the last step."""
    first, last = [len(steps)] * num_buffers, [-1] * num_buffers
    for i, step in enumerate(steps):
        for value in leaves([*step.reads, *step.writes]):
            if isinstance(value, Stored):
                first[value.buffer], last[value.buffer] = min(first[value.buffer], i), i
    for value in leaves(list(kept)):
        if isinstance(value, Stored):
            last[value.buffer] = len(steps)
    return [*zip(first, last, strict=True)]


def assign(sizes: Sequence[int], spans: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Where each buffer begins, and how long the arena is. The largest take their places first.

    >>> assign([16, 32, 16], [(0, 1), (1, 2), (2, 3)])
    ([32, 0, 32], 48)
    """
    offsets, placed = [0] * len(sizes), list[int]()
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = 0
        for j in sorted(placed, key=lambda j: offsets[j]):
            meets = spans[i][0] <= spans[j][1] and spans[j][0] <= spans[i][1]
            if meets and offsets[j] < at + sizes[i] and at < offsets[j] + sizes[j]:
                at = -(-(offsets[j] + sizes[j]) // ALIGNMENT) * ALIGNMENT
        offsets[i] = at
        placed.append(i)
    return offsets, max((offset + size for offset, size in zip(offsets, sizes, strict=True)), default=0)
