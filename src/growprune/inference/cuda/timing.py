"""CUDA graphs, to decode with and to time with: what a GPU takes, without what Python takes to start it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

BEYOND_CACHE = 1 << 28
"""Bytes of weights that no second-level cache holds enough of to matter: an H200 has 60 MB."""


class Captured:
    """A function of tensors that keep their shapes, recorded once and then replayed: a decode step, say.

    Args:
        function: it may change tensors in place, such as a cache of keys and values; it must not wait for the GPU.
        inputs: examples. The function runs with them a few times; what it changes in place is changed.
    """

    def __init__(self, function: Callable[..., Tensor], *inputs: Tensor) -> None:
        self._inputs = tuple(tensor.clone() for tensor in inputs)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # whatever is compiled or allocated at first must be done before
                function(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = function(*self._inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The output, which the next call overwrites."""
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        self._graph.replay()
        return self._output

    def replay(self) -> None:
        """Again with the same inputs."""
        self._graph.replay()


def microseconds(calls: Sequence[Callable[[], object]], *, device: torch.device, repeats: int = 10) -> float:
    """How long one of these calls takes, all of them done in turn: the median over repeats.

    On CUDA they are one graph. To time what reads weights from memory, give calls with copies of the weights, so many
    that no cache holds them (`BEYOND_CACHE`).
    """
    if device.type != "cuda":
        return _microseconds_on_the_cpu(calls, min(repeats, 3))
    captured = Captured(lambda: _all_of(calls))
    captured.replay()
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in "12")  # type: ignore[no-untyped-call]
    for start, end in zip(starts, ends, strict=True):
        start.record()
        captured.replay()
        end.record()
    torch.cuda.synchronize()
    taken: list[float] = [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]
    return statistics.median(taken) * 1e3 / len(calls)


def _all_of(calls: Sequence[Callable[[], object]]) -> Tensor:
    for call in calls:
        call()
    return torch.empty(0)


def _microseconds_on_the_cpu(calls: Sequence[Callable[[], object]], repeats: int) -> float:
    taken = []
    _all_of(calls)
    for _ in range(repeats):
        start = time.perf_counter()
        _all_of(calls)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e6 / len(calls)
