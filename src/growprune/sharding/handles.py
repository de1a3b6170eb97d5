"""Where FSDP2 keeps parameters. This file alone knows what is private to torch (2.11 to 2.13).

FSDP2 makes an `FSDPParam` of each parameter, of one size for good. An edit changes the size: it makes a new one with
the settings of the old, in its place in the group that is sent together; hooks, streams and the group stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from growprune.sharding.ranks import Ranks


class Handle:
    """One sharded parameter: its place in a group of FSDP2."""

    def __init__(self, group: Any, index: int) -> None:
        self._group, self._index = group, index
        info = self.record.mesh_info
        self.ranks = Ranks(info.shard_process_group, group.device, getattr(info, "replicate_process_group", None))

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
        """The DTensor that optimizers see, whether the module has it or the gathered one now."""
        parameter: nn.Parameter = self.record.sharded_param
        return parameter

    @property
    def is_cut_twice(self) -> bool:
        """Whether the parameter was a DTensor already when it was sharded."""
        return bool(self.record.is_dtensor)

    @property
    def gathered(self) -> nn.Parameter | None:
        """What the module computes with, from its first forward pass on."""
        return getattr(self.record, "_unsharded_param", None)

    @property
    def has_gradient(self) -> bool:
        """Whether earlier backward passes have left a gradient, summed over the ranks or not yet."""
        is_here = self.gathered is not None and self.gathered.grad is not None
        return is_here or self.parameter.grad is not None or self.record.unsharded_accumulated_grad is not None

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor sharded like the parameter, such as optimizer state, from all ranks."""
        if not isinstance(tensor, DTensor):
            return tensor
        local, rest = tensor.to_local().detach(), tensor.shape[1:].numel()
        spans = [(start * rest, stop * rest) for start, stop in self.ranks.spans(tensor.shape[0])]
        return self.ranks.join(local.reshape(-1), spans).view(tensor.shape)

    def cut(self, whole: Tensor) -> Tensor:
        """The inverse: a tensor of its own, sharded like the parameter."""
        return self._sharded(self.ranks.cut(whole).clone().to(self.parameter.device), whole.shape, whole.stride())

    def as_sharded(self, part: Tensor, length: int) -> Tensor:
        """What this rank has of a flat tensor, sharded like the parameter."""
        return self._sharded(part, torch.Size([length]), (1,))

    def _sharded(self, local: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
        spec = self.record._sharding_spec
        return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride)

    def put(self, values: Tensor, *, requires_grad: bool) -> None:
        """Let the parameter be these values, of whatever size, of which each rank keeps its own."""
        old = self.record
        policy = CPUOffloadPolicy(pin_memory=old.pin_memory) if old.offload_to_cpu else OffloadPolicy()
        settings = (old.mesh_info, old.post_forward_mesh_info, old.device, None, old.mp_policy, policy)
        parameter = nn.Parameter(values.to(old.device).contiguous(), requires_grad=requires_grad)
        self.put_back(FSDPParam(parameter, old._module_info, *settings))

    def put_back(self, record: Any) -> None:
        """Have FSDP2 hold the parameter this way."""
        reshard(self._group)
        old = self.record
        old._post_load_hook_handle.remove()
        record._param_fqn = old._param_fqn
        record.init_dtype_attrs(record.mp_policy)
        record._setattr_on_modules(record.sharded_param)
        self._group.fsdp_params[self._index] = record


def reshard(group: Any) -> None:
    """Have the modules of a group hold their shards, not what was gathered for a forward pass without a backward."""
    group._to_sharded()


def groups_of(model: nn.Module) -> Iterator[Any]:
    """The groups of parameters that FSDP2 sends together."""
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
    """By name: the parameters that FSDP2 shards. All modules hold their shards afterwards."""
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


def device_of(mesh: Any) -> torch.device:
    """Where the tensors of a mesh lie."""
    kind = mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
