"""BatchNorm over replicas: it sees the examples of all of them, as one process with the whole batch would.

torch's own SyncBatchNorm refuses CPUs, and counts a replica without examples, such as in the last batch of an epoch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from growprune.errors import GrowpruneError


def synchronise(model: nn.Module, group: Any) -> None:
    """Make every BatchNorm in training mode use the examples of all replicas of a process group."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not _is_synchronised(module):
            vars(module)["forward"] = functools.partial(_forward, module, group)


def part(model: nn.Module) -> None:
    """Undo `synchronise`."""
    for module in model.modules():
        if _is_synchronised(module):
            del vars(module)["forward"]


def _is_synchronised(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "func", None) is _forward


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


def _forward(norm: Any, group: Any, x: Tensor) -> Tensor:
    if not norm.training:
        return type(norm).forward(norm, x)  # type: ignore[no-any-return]
    axes, shape = [axis for axis in range(x.dim()) if axis != 1], (1, -1, *(1,) * (x.dim() - 2))
    seen = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    weight = _here.weight
    count = torch.full((), weight * x.numel() / x.shape[1], device=x.device)  # filled there: a copy would be waited for
    dist.all_reduce(count, group=group)
    if not count.is_cuda and count <= 1:  # a GPU would have to be waited for
        raise GrowpruneError("BatchNorm needs more than one value per channel, got a batch with one. Drop such batches")
    mean = _sum(weight * seen.sum(axes), group) / count
    centred = seen - mean.view(shape)
    # of the differences: a difference of squares cancels
    variance = _sum(weight * centred.square().sum(axes), group) / count
    if norm.track_running_stats:
        with torch.no_grad():
            unbiased = variance * count / (count - 1).clamp(min=1)
            norm.num_batches_tracked += 1
            momentum = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), momentum)
    y: Tensor = centred * (variance + norm.eps).rsqrt().view(shape)
    if norm.affine:
        y = y * norm.weight.view(shape) + norm.bias.view(shape)
    return y.to(x.dtype)


def _sum(value: Tensor, group: Any) -> Tensor:
    """Sum over replicas. Its gradient is summed too."""
    total: Tensor = torch.distributed.nn.functional.all_reduce(value, group=group)  # type: ignore[no-untyped-call]
    return total
