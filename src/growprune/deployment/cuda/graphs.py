"""CUDA graphs, for decoding and for timing: a step is recorded once, and replays take no time in Python."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from growprune.errors import GrowpruneError

BEYOND_CACHE = 1 << 29
"""Bytes of weights that are far too many for a second-level cache, such as the 50 MB of an H200."""


def graphed(step: Callable[..., Any], *example: Tensor) -> Callable[..., Any]:
    """Record a step, such as a model's forward for one token, as a CUDA graph. Call the result to replay it.

    The output is overwritten by the next call: clone it to keep it. A call without inputs uses those of the last call.

    Args:
        step: a module or function of tensors on a GPU. It may change tensors in place, such as a cache of keys and
            values and the position in it. It must not wait for the GPU (`.item()`), nor depend on what Python computes
            from call to call: positions must be tensors.
        example: inputs with the shapes and dtypes of all later ones. The step runs with them a few times and changes
            its tensors in place, so reset caches and positions afterwards.

    Examples:
        A decoder whose step takes the last tokens and gives the next ones::

            step = graphed(decoder.step, tokens)
            for _ in range(100):
                tokens = step(tokens).clone()
    """
    if not torch.cuda.is_available():
        raise GrowpruneError("graphed needs a GPU, but torch sees no CUDA device here: call the step itself")
    recorded = tuple(tensor.detach().clone() for tensor in example)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad():
        with torch.cuda.stream(stream):
            for _ in range(3):  # compile and allocate everything before recording
                step(*recorded)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            output = step(*recorded)

    def replay(*inputs: Tensor) -> Any:
        if inputs and len(inputs) != len(recorded):
            raise GrowpruneError(f"the step was recorded with {len(recorded)} inputs, got {len(inputs)}")
        for mine, given in zip(recorded, inputs, strict=False):
            if given.shape != mine.shape or given.dtype != mine.dtype:
                raise GrowpruneError(
                    f"an input is {given.dtype} {tuple(given.shape)}, but the step was recorded with {mine.dtype} "
                    f"{tuple(mine.shape)}: call graphed once for each shape"
                )
            mine.copy_(given)
        graph.replay()
        return output

    return replay


def microseconds(calls: Sequence[Callable[[], object]], *, repeats: int = 10) -> float:
    """Return how long one of these calls takes, recorded as one graph: the median over repeats.

    To time reading weights from memory, give calls with so many copies of the weights that no cache holds them
    (`BEYOND_CACHE`).
    """

    def run() -> None:
        for call in calls:
            call()

    replay = graphed(run)
    replay()
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in "12")  # type: ignore[no-untyped-call]
    for start, end in zip(starts, ends, strict=True):
        start.record()
        replay()
        end.record()
    torch.cuda.synchronize()
    taken: list[float] = [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]
    return statistics.median(taken) * 1e3 / len(calls)
