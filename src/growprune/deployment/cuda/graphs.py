"""CUDA graphs: a decode step is recorded once and then replayed, without what Python takes to start its kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from growprune.errors import GrowpruneError


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
        """The output, which the next call overwrites: clone what is to be kept."""
        if len(inputs) != len(self._inputs):
            raise GrowpruneError(f"the step was recorded with {len(self._inputs)} inputs, but given {len(inputs)}")
        for mine, given in zip(self._inputs, inputs, strict=True):
            if given.shape != mine.shape or given.dtype != mine.dtype:
                raise GrowpruneError(
                    f"an input is {given.dtype} {tuple(given.shape)}, but the step was recorded with {mine.dtype} "
                    f"{tuple(mine.shape)}: record one for each shape"
                )
            mine.copy_(given)
        self._graph.replay()
        return self._output

    def replay(self) -> None:
        """Again with the same inputs."""
        self._graph.replay()


def graphed(step: Callable[..., Any], *example: Tensor) -> Graphed:
    """Record a step, such as a model's forward for one token, as a CUDA graph. Calling what is returned replays it.

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
        raise GrowpruneError("a step was to be recorded as a CUDA graph, but torch sees no CUDA device here")
    return Graphed(step, *example)
