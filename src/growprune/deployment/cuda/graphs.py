"""CUDA graphs: a step is recorded once and then replayed, without the time Python takes to start its kernels.

To decode with, and to time with.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from growprune.errors import GrowpruneError

BEYOND_CACHE = 1 << 29
"""Bytes of weights that no second-level cache holds enough of to matter: that of an H200 has 50 MB."""


class Graphed:
    """A recorded step. Made by `graphed`."""

    def __init__(self, step: Callable[..., Any], *example: Tensor) -> None:
        self._inputs = tuple(tensor.detach().clone() for tensor in example)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad():
            with torch.cuda.stream(stream):
                for _ in range(3):  # whatever is compiled or allocated at first must be done before
                    step(*self._inputs)
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._output = step(*self._inputs)

    def __call__(self, *inputs: Tensor) -> Any:
        """Replay the step and return its output, which the next call overwrites: clone it to keep it."""
        if len(inputs) != len(self._inputs):
            raise GrowpruneError(
                f"the step was recorded with {len(self._inputs)} inputs, got {len(inputs)}: give as many"
            )
        for mine, given in zip(self._inputs, inputs, strict=True):
            if given.shape != mine.shape or given.dtype != mine.dtype:
                raise GrowpruneError(
                    f"an input is {given.dtype} {tuple(given.shape)}, but the step was recorded with {mine.dtype} "
                    f"{tuple(mine.shape)}: call graphed once for each shape"
                )
            mine.copy_(given)
        self._graph.replay()
        return self._output

    def replay(self) -> None:
        """Replay the step with the same inputs."""
        self._graph.replay()


def graphed(step: Callable[..., Any], *example: Tensor) -> Graphed:
    """Record a step, such as a model's forward for one token, as a CUDA graph. Call the result to replay it.

    Args:
        step: a module or function of tensors on a GPU. It may change tensors in place, such as a cache of keys and
            values and the position in it; it must not wait for the GPU (`.item()`), nor depend on what Python computes
            from call to call: positions must be tensors.
        example: inputs of the shapes and types that all later ones have. The step runs with them a few times, so what
            it changes in place is changed: set caches and positions back afterwards.

    Examples:
        A decoder whose step takes the last tokens and gives the next ones::

            step = graphed(decoder.step, tokens)
            for _ in range(100):
                tokens = step(tokens).clone()
    """
    if not torch.cuda.is_available():
        raise GrowpruneError("graphed needs a GPU, but torch sees no CUDA device here: call the step itself")
    return Graphed(step, *example)


def microseconds(calls: Sequence[Callable[[], object]], *, device: torch.device, repeats: int = 10) -> float:
    """How long one of these calls takes, all of them done in turn: the median over repeats.

    On CUDA they are one graph. To time what reads weights from memory, give calls with enough
    copies of the weights that no cache holds them (`BEYOND_CACHE`).
    """

    def run() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        run()
        seconds = []
        for _ in range(min(repeats, 3)):
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds) * 1e6 / len(calls)
    recorded = Graphed(run)
    recorded.replay()
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in "12")  # type: ignore[no-untyped-call]
    for start, end in zip(starts, ends, strict=True):
        start.record()
        recorded.replay()
        end.record()
    torch.cuda.synchronize()
    taken: list[float] = [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]
    return statistics.median(taken) * 1e3 / len(calls)
