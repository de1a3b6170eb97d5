"""Forward and backward passes of a batch: as they come, over replicas, compiled, or as a CUDA graph.

A graph is a recording of all kernels of a forward and a backward pass, which the GPU repeats without waiting for
Python. It is made for batches of one shape, once the same shape has come a few times, and made anew when an edit gives
layers new parameters. Masks change in place, so they may change between two replays.

Over replicas, BatchNorm sees the examples of all of them, as one process with the whole batch would. torch's own
SyncBatchNorm does this on GPUs only, and these run on CPUs too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from growprune.engine.batches import split
from growprune.engine.mesh import Mesh
from growprune.engine.recipe import Recipe
from growprune.errors import GrowpruneError
from growprune.sparse.model import SparseModel
from growprune.tasks.task import leaves_of, map_tensors

WARM_UP = 3
"""Number of batches of one shape before recording. Libraries choose their kernels in the first ones."""


class Backward:
    """Runs the backward pass of a batch and returns its loss."""

    def __init__(self, recipe: Recipe, sparse: SparseModel, device: torch.device, mesh: Mesh) -> None:
        self.recipe, self.sparse, self.device, self.mesh = recipe, sparse, device, mesh
        self._wrapped: nn.Module | None = None
        self._parameters: list[int] = []
        self._compiled = torch.compile(self.loss, dynamic=False) if recipe.compile and self._is_recorded else self.loss
        self._graphs: dict[Any, Graph] = {}
        """CUDA graphs by the shape of their batches."""

    @property
    def _is_recorded(self) -> bool:
        return self.recipe.is_recorded(self.device) and self.mesh.data_group is None

    def __call__(self, batch: Any, weight: Any) -> Tensor:
        """Return the weighted loss, summed over replicas, and add its gradients to those of the parameters."""
        # in this thread: in one of autograd's own a compact step took 44 ms instead of 32 (docs/memory.md)
        with torch.autograd.set_multithreading_enabled(self.mesh.data_group is not None):
            if self._is_recorded and not self.sparse.gradients.is_watching:
                return self._recorded_pass(batch, weight)
            return self._eager_pass(batch, weight)

    def _eager_pass(self, batch: Any, weight: Any) -> Tensor:
        mine, share = split(batch, self.mesh.replica, self.mesh.replicas)
        with self.mesh.waiting("adding up gradients over replicas"), counting(share > 0):
            loss = self._loss(self._forward(), mine) * weight * share
            (loss * self.mesh.replicas).backward()  # which replicas average
        return self.mesh.sum_over_replicas(loss.detach().double())

    def loss(self, batch: Any) -> Tensor:
        """The loss of a batch, before the backward pass."""
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
        """The model, wrapped in DistributedDataParallel if there are replicas. Wrapped anew if parameters changed."""
        if self.mesh.data_group is None or self.sparse.ranks is not None:
            return self.sparse.model
        parameters = [id(parameter) for parameter in self.sparse.model.parameters()]
        if self._wrapped is None or parameters != self._parameters:
            self.unwrap()
            if self.recipe.sync_batchnorm:
                synchronise(self.sparse.model, self.mesh.data_group)
            with self.mesh.waiting("comparing the models of replicas"):
                self._wrapped = DistributedDataParallel(self.sparse.model, process_group=self.mesh.data_group)
            self._parameters = parameters
        return self._wrapped

    def own_stream(self) -> Any:
        """A CUDA stream for recording. CUDA graphs cannot be recorded on the default stream."""
        if not self.recipe.is_recorded(self.device):
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def unwrap(self) -> None:
        """Remove the DistributedDataParallel wrapper, because an edit may replace parameters that it holds."""
        self._wrapped = None
        part(self.sparse.model)


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
        self._batch = map_tensors(Tensor.clone, batch)
        for parameter in self._parameters:
            parameter.grad = None
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, pool=self.pool, stream=torch.cuda.current_stream()):
            self._loss = self._passes(self._batch)
        self._gradients = [parameter.grad for parameter in self._parameters]


def shape_of(batch: Any) -> Any:
    """The shapes and dtypes of a batch. Batches with equal ones can share a CUDA graph."""
    leaves = leaves_of(batch)
    return tuple((tuple(x.shape), x.dtype, x.stride()) if isinstance(x, Tensor) else x for x in leaves)


def _copy_into(target: Any, batch: Any) -> None:
    for mine, theirs in zip(leaves_of(target), leaves_of(batch), strict=True):
        if isinstance(mine, Tensor):
            mine.copy_(theirs, non_blocking=True)


def synchronise(model: nn.Module, group: Any) -> None:
    """Make every BatchNorm in training mode use the examples of all replicas of a process group."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not hasattr(module, "_group"):
            # mypy takes a class for one of its instances here, and finds no __hash__
            module.__class__ = _synchronised(type(module))  # type: ignore[arg-type]
            module.__dict__["_group"] = group  # no submodule, no buffer: the state_dict stays as it was


def part(model: nn.Module) -> None:
    """Undo `synchronise`."""
    for module in model.modules():
        if "_group" in module.__dict__:
            module.__class__ = type(module).__mro__[1]
            del module.__dict__["_group"]


_here = SimpleNamespace(weight=1)
"""Weight of this replica's examples. Not a context variable, because autograd recomputes in threads of its own."""


@contextmanager
def counting(is_counted: bool) -> Iterator[None]:
    """Inside this context, BatchNorm counts the examples of this replica, or ignores them."""
    _here.weight = int(is_counted)
    try:
        yield
    finally:
        _here.weight = 1


@functools.cache
def _synchronised(kind: type[_BatchNorm]) -> type[_BatchNorm]:
    return type(f"Synchronised{kind.__name__}", (kind,), {"forward": _forward})


def _forward(norm: Any, x: Tensor) -> Tensor:
    if not norm.training:
        return super(type(norm), norm).forward(x)  # type: ignore[no-any-return]
    axes = [axis for axis in range(x.dim()) if axis != 1]
    seen = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    weight = _here.weight
    count = torch.full((), weight * x.numel() / x.shape[1], device=x.device)  # filled there: a copy would be waited for
    dist.all_reduce(count, group=norm._group)
    if not count.is_cuda and count <= 1:  # a GPU would have to be waited for
        raise GrowpruneError("BatchNorm needs more than one value per channel, got a batch with one. Drop such batches")
    mean = _sum(weight * seen.sum(axes), norm._group) / count
    centred = seen - _along(mean, x)
    # of the differences: a difference of squares cancels
    variance = _sum(weight * centred.square().sum(axes), norm._group) / count
    if norm.track_running_stats:
        _follow(norm, mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
    y = centred * _along((variance + norm.eps).rsqrt(), x)
    if norm.affine:
        y = y * _along(norm.weight, x) + _along(norm.bias, x)
    return y.to(x.dtype)


class SumOverReplicas(torch.autograd.Function):
    """Sum over replicas. Its gradient is summed too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _sum(value: Tensor, group: Any) -> Tensor:
    return SumOverReplicas.apply(value, group)  # type: ignore[no-any-return,no-untyped-call]


def _along(channels: Tensor, x: Tensor) -> Tensor:
    return channels.view(1, -1, *(1,) * (x.dim() - 2))


@torch.no_grad()
def _follow(norm: Any, mean: Tensor, variance: Tensor) -> None:
    norm.num_batches_tracked += 1
    momentum = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), momentum)
