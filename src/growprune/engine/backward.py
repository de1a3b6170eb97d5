"""Forward and backward passes of a batch: as they come, over replicas, compiled, or as a CUDA graph.

A graph is a recording of all kernels of a forward and a backward pass, which the GPU repeats without waiting for
Python. It is made for batches of one shape, once the same shape has come a few times, and made anew when an edit gives
layers new parameters. Masks change in place, so they may change between two replays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from growprune.engine import batchnorm
from growprune.engine.batch_split import split
from growprune.engine.mesh import Mesh
from growprune.engine.recipe import Recipe
from growprune.sparse.internals import internals
from growprune.sparse.model import SparseModel

WARM_UP = 3
"""How many batches of one shape are passed before they are recorded: libraries choose their kernels in the first."""


class Backward:
    """Adds the gradients of a batch to those of a model's parameters, and gives its loss."""

    def __init__(self, recipe: Recipe, sparse: SparseModel, device: torch.device, mesh: Mesh) -> None:
        self.recipe, self.sparse, self.device, self.mesh = recipe, sparse, device, mesh
        self._wrapped: nn.Module | None = None
        self._parameters: list[int] = []
        self._compiled = torch.compile(self.loss, dynamic=False) if recipe.compile and self._is_recorded else self.loss
        self._graphs: dict[Any, Graph] = {}
        """By the shape of their batches."""

    @property
    def _is_recorded(self) -> bool:
        return self.recipe.is_recorded(self.device) and self.mesh.data_group is None

    def __call__(self, batch: Any, weight: Any) -> Tensor:
        """The loss times its weight, summed over all replicas; its gradients are added to the parameters' own."""
        # in this thread: in one of autograd's own a compact step took 44 ms instead of 32 (docs/memory.md)
        with torch.autograd.set_multithreading_enabled(self.mesh.data_group is not None):
            if self._is_recorded and not internals(self.sparse).gradients.is_watching:
                return self._recorded_pass(batch, weight)
            return self._eager_pass(batch, weight)

    def _eager_pass(self, batch: Any, weight: Any) -> Tensor:
        mine, share = split(batch, self.mesh.replica, self.mesh.replicas)
        with self.mesh.waiting("adding up gradients over replicas"), batchnorm.counting(share > 0):
            loss = self._loss(self._forward(), mine) * weight * share
            (loss * self.mesh.replicas).backward()  # which replicas average
        return self.mesh.sum_over_replicas(loss.detach().double())

    def loss(self, batch: Any) -> Tensor:
        """The loss of a batch, with no gradients yet."""
        return self._loss(self.sparse.model, batch)

    def _loss(self, forward: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.precision == "bf16"):
            return self.recipe.task.loss(forward, batch)

    def _recorded_pass(self, batch: Any, weight: Any) -> Tensor:
        def passes(batch: Any) -> Tensor:
            loss: Tensor = self._compiled(batch) * weight
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        if self.recipe.accumulate > 1:  # a graph writes gradients, and cannot add to them
            return passes(batch).double()
        parameters = self._own_parameters()
        if not all(graph.is_of(parameters) for graph in self._graphs.values()):
            self._graphs = {}  # an edit gave layers new parameters
        pool = next((graph.pool for graph in self._graphs.values()), None) or torch.cuda.graph_pool_handle()
        graph = self._graphs.setdefault(shape_of(batch), Graph(passes, parameters, pool))
        return graph(batch).double()

    def _own_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.sparse.model.parameters() if p.requires_grad]

    def _forward(self) -> nn.Module:
        """The model, or what keeps the gradients of its replicas the same: wrapped anew if it has other parameters."""
        if self.mesh.data_group is None or internals(self.sparse).ranks is not None:
            return self.sparse.model
        parameters = [id(parameter) for parameter in self.sparse.model.parameters()]
        if self._wrapped is None or parameters != self._parameters:
            self.unwrap()
            if self.recipe.sync_batchnorm:
                batchnorm.synchronise(self.sparse.model, self.mesh.data_group)
            with self.mesh.waiting("comparing the models of replicas"):
                self._wrapped = DistributedDataParallel(self.sparse.model, process_group=self.mesh.data_group)
            self._parameters = parameters
        return self._wrapped

    def own_stream(self) -> Any:
        """A CUDA graph cannot be recorded on the default stream, nor if what went before was on another one."""
        if not self.recipe.is_recorded(self.device):
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def unwrap(self) -> None:
        """Let the model be alone again: what it is wrapped in holds parameters that an edit may replace."""
        self._wrapped = None
        batchnorm.part(self.sparse.model)


class Graph:
    """Forward and backward passes of batches of one shape; eager until it is recorded.

    Args:
        passes: what to record; leaves gradients in `parameters` and returns the loss.
        pool: the memory it shares with graphs of other shapes, as no two of them run at once.
    """

    def __init__(self, passes: Callable[[Any], Tensor], parameters: list[nn.Parameter], pool: Any) -> None:
        self._passes, self._parameters, self.pool = passes, parameters, pool
        self._num_passed = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Any = None
        self._gradients: list[Tensor | None] = []
        self._loss: Tensor | None = None

    def is_of(self, parameters: list[nn.Parameter]) -> bool:
        return len(parameters) == len(self._parameters) and all(
            mine is theirs for mine, theirs in zip(self._parameters, parameters, strict=True)
        )

    def __call__(self, batch: Any) -> Tensor:
        if self._num_passed < WARM_UP:
            self._num_passed += 1
            return self._passes(batch)
        if self._graph is None:
            self._record(batch)
        assert self._graph is not None and self._loss is not None
        _copy_into(self._batch, batch)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss

    def _record(self, batch: Any) -> None:
        self._batch = _cloned(batch)
        for parameter in self._parameters:
            parameter.grad = None
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, pool=self.pool, stream=torch.cuda.current_stream()):
            self._loss = self._passes(self._batch)
        self._gradients = [parameter.grad for parameter in self._parameters]


def shape_of(batch: Any) -> Any:
    """Equal for batches that a graph can take for one another."""
    if isinstance(batch, Tensor):
        return (tuple(batch.shape), batch.dtype, batch.stride())
    items = batch.values() if isinstance(batch, dict) else batch
    return tuple(map(shape_of, items)) if isinstance(batch, dict | tuple | list) else batch


def _cloned(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: _cloned(item) for name, item in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(_cloned(item) for item in batch)
    return batch.clone() if isinstance(batch, Tensor) else batch


def _copy_into(target: Any, batch: Any) -> None:
    if isinstance(target, Tensor):
        target.copy_(batch, non_blocking=True)
    elif isinstance(target, dict):
        for name, item in target.items():
            _copy_into(item, batch[name])
    elif isinstance(target, tuple | list):
        for mine, item in zip(target, batch, strict=True):
            _copy_into(mine, item)
