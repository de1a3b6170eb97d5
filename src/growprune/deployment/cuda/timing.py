"""What a GPU takes, without what Python takes to start it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from growprune.deployment.cuda.graphs import Graphed

BEYOND_CACHE = 1 << 29
"""Bytes of weights that no second-level cache holds enough of to matter: that of an H200 has 50 MB."""


def microseconds(calls: Sequence[Callable[[], object]], *, device: torch.device, repeats: int = 10) -> float:
    """How long one of these calls takes, all of them done in turn: the median over repeats.

    On CUDA they are one graph. To time what reads weights from memory, give calls with copies of the weights, so many
    that no cache holds them (`BEYOND_CACHE`).
    """
    if device.type != "cuda":
        return _microseconds_on_the_cpu(calls, min(repeats, 3))
    recorded = Graphed(lambda: _all_of(calls))
    recorded.replay()
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in "12")  # type: ignore[no-untyped-call]
    for start, end in zip(starts, ends, strict=True):
        start.record()
        recorded.replay()
        end.record()
    torch.cuda.synchronize()
    taken: list[float] = [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]
    return statistics.median(taken) * 1e3 / len(calls)


def _all_of(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _microseconds_on_the_cpu(calls: Sequence[Callable[[], object]], repeats: int) -> float:
    taken = []
    _all_of(calls)
    for _ in range(repeats):
        start = time.perf_counter()
        _all_of(calls)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e6 / len(calls)
