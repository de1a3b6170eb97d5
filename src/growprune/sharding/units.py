"""Shard a sparse model with torch's FSDP2: choose the units, and check what is not supported."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from growprune.errors import GrowpruneError
from growprune.masks.bits import pack
from growprune.sharding.handles import device_of, groups_of, handles_of, reshard
from growprune.sharding.layout import shard_masks
from growprune.sharding.parameter import ShardedCompact
from growprune.sharding.ranks import Ranks
from growprune.storage import Compact

if TYPE_CHECKING:
    from growprune.sparse.internals import Internals

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Modules whose children are the blocks of a model."""


def shard(sparse: Internals, mesh: DeviceMesh, *, units: Sequence[str] | None = None, **settings: Any) -> None:
    """Apply `fully_shard` to the units of a model, inner ones first, then to the model."""
    sharding = UnitByUnit(sparse, mesh, units=units, **settings)
    check_masks(sparse, sharding.ranks)
    for module in units_of(sparse.model, units):
        sharding.done(module)
    adopt(sparse)


class UnitByUnit:
    """Shard each unit of a model as soon as it is filled, so that no rank ever has the whole model.

    Args:
        units, masks: as for `SparseModel.shard`.
        settings: further arguments of `fully_shard`.
    """

    def __init__(
        self,
        sparse: Internals,
        mesh: DeviceMesh,
        *,
        units: Sequence[str] | None = None,
        masks: bool = False,
        **settings: Any,
    ) -> None:
        check_mesh(mesh)
        check_shardable(sparse.storage)
        if any(isinstance(module, FSDPModule) for module in sparse.model.modules()):
            raise GrowpruneError("the model is already sharded: shard it only once, with one mesh")
        self._left = {id(module) for module in units_of(sparse.model, units)}
        self._mesh, self._settings = mesh, settings
        shards, replicas = mesh.get_group(mesh.ndim - 1), mesh.get_group(0) if mesh.ndim > 1 else None
        self.ranks = Ranks(shards, device_of(mesh), replicas)
        self._shards_masks = sparse.shards_masks = masks

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    def done(self, module: nn.Module) -> None:
        """Called with each module whose parameters are filled, inner ones first."""
        if id(module) in self._left:
            fully_shard(module, mesh=self._mesh, **self._settings)
            if self._shards_masks:
                shard_masks(module, self.ranks)

    def check_random_state(self) -> None:
        """Raise on all ranks if their random states differ."""
        mine = torch.tensor([_digest(torch.get_rng_state().numpy().tobytes() + str(torch.initial_seed()).encode())])
        if differing := _first_to_differ(mine, self.ranks):
            raise GrowpruneError(
                f"rank {differing[0]} has another random state than rank 0: call torch.manual_seed with the same seed "
                f"on all ranks before the model is built"
            )


def units_of(model: nn.Module, names: Sequence[str] | None) -> list[nn.Module]:
    """Return the modules to shard, inner ones first, the model last.

    Args:
        names: names or globs of modules; by default the blocks of the model's outermost lists.
    """
    if names is None:
        return [*_blocks(model), model]
    named = [(name, module) for name, module in model.named_modules() if name]
    for glob in names:
        if not any(fnmatchcase(name, glob) for name, _ in named):
            raise GrowpruneError(
                f"units has {glob!r}, which matches no module of the model; use names like {named[0][0]!r}"
            )
    inner_first = reversed([m for name, m in named if any(fnmatchcase(name, glob) for glob in names)])
    return [*(module for module in inner_first if _has_parameters(module)), model]


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, CONTAINERS) and not isinstance(child, CONTAINERS):
            if _has_parameters(child):
                yield child
        else:
            yield from _blocks(child)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def adopt(sparse: Internals) -> None:
    """Register with a sparse model what FSDP2 has sharded, through `shard` or the user's own calls."""
    if sparse.ranks is not None:
        for group in groups_of(sparse.model):
            reshard(group)
        return
    handles = handles_of(sparse.model)
    if not handles:
        return
    check_shardable(sparse.storage)
    ranks = next(iter(handles.values())).ranks
    check_masks(sparse, ranks)
    for name, parameter in sparse.stored.items():
        if name in handles:
            assert isinstance(parameter, Compact)
            if handles[name].ranks.group is not ranks.group:
                raise GrowpruneError(
                    f"{name} is sharded over another mesh than the other weights: use one mesh for all"
                )
            sparse.stored[name] = ShardedCompact(parameter, handles[name], shards_mask=sparse.shards_masks)
    sparse.ranks = sparse.gradients.shares = ranks


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise unless the argument is a mesh that contains this process."""
    if not isinstance(mesh, DeviceMesh):
        raise GrowpruneError(
            f"mesh must be a DeviceMesh, got a {type(mesh).__name__}: create it with "
            f"torch.distributed.device_mesh.init_device_mesh after init_process_group"
        )
    if mesh.get_coordinate() is None:
        raise GrowpruneError(
            f"the mesh has ranks {mesh.mesh.flatten().tolist()}, but this is rank {distributed.get_rank()} of "
            f"{distributed.get_world_size()}: create a mesh that contains every process"
        )
    if mesh.ndim > 2:
        raise GrowpruneError(f"the mesh must have 1 dimension (FSDP) or 2 (replicas of shards, HSDP), got {mesh.ndim}")


def sharded_names(model: nn.Module, storage: str) -> set[str]:
    """Return the parameters of a model that FSDP2 has already sharded. All modules hold their shards afterwards."""
    handles = handles_of(model)
    check_shardable(storage)
    for name, handle in handles.items():
        if handle.is_cut_twice:
            raise GrowpruneError(
                f"{name} was sharded by tensor parallelism before FSDP2, which sparse weights do not support: use only "
                f"fully_shard"
            )
    return set(handles)


def check_shardable(storage: str) -> None:
    """Raise if this storage cannot be sharded."""
    if storage != "compact":
        raise GrowpruneError(
            "a model with storage='masked' cannot be sharded, because each rank would hold and send dense weights: "
            "create the SparseModel with storage='compact'"
        )


def check_masks(sparse: Internals, ranks: Ranks) -> None:
    """Raise on all ranks if their masks differ, because their shards would belong to different weights."""
    mine = torch.tensor([_digest(pack(p.mask()).cpu().numpy().tobytes()) for p in sparse.stored.values()])
    if differing := _first_to_differ(mine, ranks):
        raise GrowpruneError(
            f"rank {differing[0]} has another mask of {list(sparse.stored)[differing[1]]} than rank 0: use the same "
            f"seed and edits on all ranks before sharding"
        )


def _first_to_differ(mine: Tensor, ranks: Ranks) -> tuple[int, int] | None:
    """Return the first rank that differs from rank 0, and the index of the difference; None if all agree."""
    for group in filter(None, (ranks.group, ranks.replicas)):
        rows = Ranks(group, ranks.device).each(mine.to(ranks.device)).tolist()
        for rank, row in zip(distributed.get_process_group_ranks(group), rows, strict=True):
            for place, (own, first) in enumerate(zip(row, rows[0], strict=True)):
                if own != first:
                    return rank, place
    return None


def _digest(octets: bytes) -> int:
    return int.from_bytes(hashlib.sha256(octets).digest()[:8], "little", signed=True)
