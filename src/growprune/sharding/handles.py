"""Access to FSDP2's records of parameters. Only this file uses private names of FSDP2 (torch 2.11 to 2.13).

FSDP2 creates an `FSDPParam` of fixed size for each parameter. An edit changes the size, so it creates a new one with
the same settings, in its place in the group that is sent together. Hooks, streams and the group stay unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor


class Ranks:
    """The ranks over which weights are sharded, in order. The n-th rank has the n-th chunk of every tensor.

    Args:
        device: the device that tensors must be on to be sent.
    """

    def __init__(self, group: distributed.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.size, self.rank = distributed.get_world_size(group), distributed.get_rank(group)

    @property
    def is_first(self) -> bool:
        """True if this process writes what all processes share."""
        return self.rank == 0

    def spans(self, length: int) -> list[tuple[int, int]]:
        """Return the (start, end) of each rank in a tensor of this length, as `torch.chunk` splits it."""
        step = -(-length // self.size)
        return [(min(length, step * rank), min(length, step * (rank + 1))) for rank in range(self.size)]

    def local_shard(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of a tensor, as a view."""
        start, stop = self.spans(tensor.shape[0])[self.rank]
        return tensor[start:stop]

    def all_gather(self, shard: Tensor, length: int) -> Tensor:
        """Gather a tensor with this many rows from the shards of all ranks: the inverse of `local_shard`."""
        if self.size == 1:
            return shard.clone()
        rows = [stop - start for start, stop in self.spans(length)]
        padded = torch.zeros(max(rows), *shard.shape[1:], dtype=shard.dtype, device=self.device)
        padded[: len(shard)] = shard
        shards = [torch.empty_like(padded) for _ in rows]
        distributed.all_gather(shards, padded, group=self.group)
        return torch.cat([own[:count] for own, count in zip(shards, rows, strict=True)]).to(shard.device)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        total = tensor.to(self.device, copy=True)
        distributed.all_reduce(total, group=self.group)
        return total.to(tensor.device)


class Handle:
    """One sharded parameter in a group of FSDP2."""

    def __init__(self, group: Any, index: int) -> None:
        self._group, self._index = group, index
        info = self.record.mesh_info
        self.ranks = Ranks(info.shard_process_group, group.device)
        self.has_replicas = getattr(info, "replicate_process_group", None) is not None

    @property
    def record(self) -> Any:
        return self._group.fsdp_params[self._index]

    @property
    def place(self) -> tuple[nn.Module, str]:
        """The module that has the parameter, and its name there."""
        info = self.record._module_info
        return info.module, info.param_name

    @property
    def unit(self) -> nn.Module:
        """The module that was sharded, before whose forward pass the parameter is gathered."""
        module: nn.Module = self._group.modules[0]
        return module

    @property
    def parameter(self) -> nn.Parameter:
        """The DTensor that optimizers see, also while the module holds the gathered parameter."""
        parameter: nn.Parameter = self.record.sharded_param
        return parameter

    @property
    def is_cut_twice(self) -> bool:
        """True if the parameter was already a DTensor when FSDP2 sharded it."""
        return bool(self.record.is_dtensor)

    @property
    def gathered(self) -> nn.Parameter | None:
        """The gathered parameter that the module computes with, after its first forward pass."""
        return getattr(self.record, "_unsharded_param", None)

    @property
    def has_gradient(self) -> bool:
        """True if earlier backward passes have left a gradient, whether or not it is summed over the ranks."""
        is_here = self.gathered is not None and self.gathered.grad is not None
        return is_here or self.parameter.grad is not None or self.record.unsharded_accumulated_grad is not None

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather a tensor that is sharded like the parameter, such as optimizer state."""
        if not isinstance(tensor, DTensor):
            return tensor
        return self.ranks.all_gather(tensor.to_local().detach(), tensor.shape[0])

    def shard(self, full: Tensor) -> Tensor:
        """Shard a full tensor like the parameter: the inverse of `all_gather`."""
        local = self.ranks.local_shard(full).clone().to(self.parameter.device)
        return self.as_sharded(local, full.shape, full.stride())

    def as_sharded(self, local: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
        """Wrap this rank's shard of a tensor as one that is sharded like the parameter."""
        spec = self.record._sharding_spec
        return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride)

    def put(self, values: Tensor, *, requires_grad: bool) -> None:
        """Replace the parameter with these values, of any size. Each rank keeps its own part."""
        old = self.record
        policy = CPUOffloadPolicy(pin_memory=old.pin_memory) if old.offload_to_cpu else OffloadPolicy()
        settings = (old.mesh_info, old.post_forward_mesh_info, old.device, None, old.mp_policy, policy)
        parameter = nn.Parameter(values.to(old.device).contiguous(), requires_grad=requires_grad)
        self.put_back(FSDPParam(parameter, old._module_info, *settings))

    def put_back(self, record: Any) -> None:
        """Make FSDP2 use this record of the parameter."""
        reshard(self._group)
        old = self.record
        old._post_load_hook_handle.remove()
        record._param_fqn = old._param_fqn
        record.init_dtype_attrs(record.mp_policy)
        record._setattr_on_modules(record.sharded_param)
        self._group.fsdp_params[self._index] = record


def reshard(group: Any) -> None:
    """Reshard the modules of a group, if a forward pass without a backward has left them gathered."""
    group._to_sharded()


def groups_of(model: nn.Module) -> Iterator[Any]:
    """Yield the groups of parameters that FSDP2 sends together."""
    seen: set[int] = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        several = getattr(state, "_fsdp_param_groups", None)  # since torch 2.12
        for group in [state._fsdp_param_group] if several is None else several:
            if group is not None and id(group) not in seen:
                seen.add(id(group))
                yield group


def handles_of(model: nn.Module) -> dict[str, Handle]:
    """Return the parameters that FSDP2 shards, by name. All modules hold their shards afterwards."""
    found: dict[tuple[int, str], Handle] = {}
    for group in groups_of(model):
        reshard(group)
        for index in range(len(group.fsdp_params)):
            handle = Handle(group, index)
            found[id(handle.place[0]), handle.place[1]] = handle
    if not found:
        return {}  # soon, as every plain model is asked often
    names = {}
    for name, _ in model.named_parameters():
        path, _, local = name.rpartition(".")
        if (handle := found.get((id(model.get_submodule(path)), local))) is not None:  # type: ignore[assignment]
            names[name] = handle
    return names
