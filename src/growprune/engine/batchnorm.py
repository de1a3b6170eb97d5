"""BatchNorm over the examples of all replicas, as one process with the whole batch would have it.

torch's own SyncBatchNorm does this on GPUs only, and these run on CPUs too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from growprune.errors import GrowpruneError


def synchronise(model: nn.Module, group: Any) -> None:
    """Let every BatchNorm of a model, while it trains, use what all replicas of a process group see."""
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
"""What the examples of this replica count. Not a context variable: autograd computes again in threads of its own."""


@contextmanager
def counting(is_counted: bool) -> Iterator[None]:
    """While a replica goes through a share of a batch: whether its examples are part of the batch."""
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
        raise GrowpruneError("BatchNorm needs more than one value per channel, but a batch leaves one: leave such out")
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
    """The sum of what each replica has; its gradient is the sum of theirs."""

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
