"""Shard a sparse model with torch's FSDP2: choose the units, and check what is not supported."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from growprune.errors import GrowpruneError
from growprune.sharding.handles import Handle, Ranks, groups_of, handles_of, reshard
from growprune.sparse.stepper import first_to_differ
from growprune.storage.compact import Compact, set_layout
from growprune.storage.compact_layers import hand_over
from growprune.storage.kernels import Layout
from growprune.storage.parameter import SparseParameter

if TYPE_CHECKING:
    from growprune.sparse.model import SparseModel

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Modules whose children are the blocks of a model."""


def shard(sparse: SparseModel, mesh: DeviceMesh, *, units: Sequence[str] | None = None, **settings: Any) -> None:
    """Apply `fully_shard` to the units of a model, inner ones first, then to the model."""
    sharding = UnitByUnit(sparse, mesh, units=units, **settings)
    _check_masks(sparse, sharding.ranks)
    for module in units_of(sparse.model, units):
        sharding.done(module)
    sparse.notice_shards()


class UnitByUnit:
    """Shard each unit of a model as soon as it is filled, so that no rank ever has the whole model.

    Args:
        units: as for `SparseModel.shard`.
        settings: further arguments of `fully_shard`.
    """

    def __init__(
        self, sparse: SparseModel, mesh: DeviceMesh, *, units: Sequence[str] | None = None, **settings: Any
    ) -> None:
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
        if mesh.ndim != 1:
            raise GrowpruneError(f"the mesh has {mesh.ndim} dimensions, as for HSDP: shard over one dimension")
        _check_storage(sparse.storage)
        if any(isinstance(module, FSDPModule) for module in sparse.model.modules()):
            raise GrowpruneError("the model is already sharded: shard it only once, with one mesh")
        self._left = {id(module) for module in units_of(sparse.model, units)}
        self._mesh, self._settings = mesh, settings
        kind = mesh.device_type
        device = torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
        self.ranks = Ranks(mesh.get_group(), device)

    def done(self, module: nn.Module) -> None:
        """Called with each module whose parameters are filled, inner ones first."""
        if id(module) in self._left:
            fully_shard(module, mesh=self._mesh, **self._settings)

    def check_random_state(self) -> None:
        """Raise on all ranks if their random states differ."""
        mine = torch.get_rng_state().numpy().tobytes() + str(torch.initial_seed()).encode()
        if differing := first_to_differ([mine], self.ranks.device, self.ranks.group):
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


def newly_sharded(sparse: SparseModel) -> tuple[dict[str, SparseParameter], Ranks] | None:
    """Return how the weights are stored that FSDP2 has sharded, through `shard` or the user's own calls, and its ranks.

    None if it has sharded none, or if the model knows already.
    """
    if sparse.ranks is not None:
        for group in groups_of(sparse.model):
            reshard(group)
        return None
    handles = _checked_handles(sparse.model, sparse.storage)
    if not handles:
        return None
    ranks = next(iter(handles.values())).ranks
    sharded = {name: parameter for name, parameter in sparse.stored.items() if name in handles}
    for name in sharded:
        if handles[name].ranks.group is not ranks.group:
            raise GrowpruneError(f"{name} is sharded over another mesh than the other weights: use one mesh for all")
    _check_masks(sparse, ranks)
    stored: dict[str, SparseParameter] = {}
    for name, parameter in sharded.items():
        assert isinstance(parameter, Compact)
        stored[name] = ShardedCompact(parameter, handles[name])
    return stored, ranks


def sharded_names(model: nn.Module, storage: str) -> set[str]:
    """Return the parameters of a model that FSDP2 has already sharded. All modules hold their shards afterwards."""
    return set(_checked_handles(model, storage))


def _checked_handles(model: nn.Module, storage: str) -> dict[str, Handle]:
    """Return the parameters that FSDP2 shards, by name. Raise if sparse weights do not support how."""
    handles = handles_of(model)
    if handles:
        _check_storage(storage)
    for name, handle in handles.items():
        if handle.is_cut_twice:
            raise GrowpruneError(
                f"{name} was sharded by tensor parallelism before FSDP2, which sparse weights do not support: use only "
                f"fully_shard"
            )
        if handle.has_replicas:
            raise GrowpruneError(f"{name} is sharded over a mesh of two dimensions (HSDP): shard over one dimension")
    return handles


def _check_storage(storage: str) -> None:
    if storage != "compact":
        raise GrowpruneError(
            "a model with storage='masked' cannot be sharded, because each rank would hold and send dense weights: "
            "create the SparseModel with storage='compact'"
        )


def _check_masks(sparse: SparseModel, ranks: Ranks) -> None:
    """Raise on all ranks if their masks differ, because their shards would belong to different weights."""
    mine = [mask.cpu().numpy().tobytes() for mask in sparse.packed_masks().values()]
    if differing := first_to_differ(mine, ranks.device, ranks.group):
        raise GrowpruneError(
            f"rank {differing[0]} has another mask of {list(sparse.stored)[differing[1]]} than rank 0: use the same "
            f"seed and edits on all ranks before sharding"
        )


class ShardedCompact(Compact):
    """A `Compact` parameter that is sharded. Its methods are collectives: all ranks must call them.

    Values and optimizer state are gathered for one parameter at a time, and only for an edit.
    """

    def __init__(self, compact: Compact, handle: Handle) -> None:
        self.__dict__.update(compact.__dict__)
        self.handle = handle
        self._is_trained = handle.parameter.requires_grad
        self._ask_for_gradients()
        self._hooked: weakref.ref[nn.Parameter] | None = None
        if self._record is not None:
            self._listen()

    @property
    def parameter(self) -> nn.Parameter:
        return self.handle.parameter

    def to_dense(self, tensor: Tensor) -> Tensor:
        return super().to_dense(self.handle.all_gather(tensor))

    def from_dense(self, dense: Tensor) -> Tensor:
        return self.handle.shard(super().from_dense(dense))

    def to_live(self, tensor: Tensor) -> Tensor:
        return super().to_live(self.handle.all_gather(tensor))

    def from_live(self, live: Tensor) -> Tensor:
        found = super().from_live(live)
        return found if isinstance(found, DTensor) else self.handle.shard(found)

    def _place(self, values: Tensor, layout: Layout | None) -> None:
        set_layout(self.module, self._local, layout)
        self.handle.put(values, requires_grad=self._is_trained)
        self._ask_for_gradients()

    def _ask_for_gradients(self) -> None:
        """Switch gradients off if no weight is live: FSDP2 cannot send an empty gradient."""
        self.parameter.requires_grad_(self._is_trained and self.parameter.numel() > 0)

    def preview(self, mask: Tensor) -> Callable[[], None]:
        record, layout = self.handle.record, self._layout
        self.set_mask(mask)

        def undo() -> None:
            set_layout(self.module, self._local, layout)
            self.handle.put_back(record)

        return undo

    # Gradients

    @property
    def is_first_gradient(self) -> bool:
        return not self.handle.has_gradient

    @property
    def adds_up_gradients(self) -> bool:
        return False  # each backward pass is seen by itself

    def see(self, gradient: Tensor) -> None:
        """Record the mean gradient over the ranks, because each rank has seen different examples."""
        if self._record is not None:
            wide = gradient.detach() if gradient.dtype == torch.float64 else gradient.detach().float()
            self._record(self.handle.ranks.all_reduce_sum(wide).div_(self.handle.ranks.size))

    def _listen(self) -> None:
        if self._layout is not None:
            self._layout.recorder = weakref.ref(self)
        elif (gathered := self.handle.gathered) is not None:
            if self._hooked is None or self._hooked() is not gathered:  # of each backward pass, before it is added up
                me = weakref.ref(self)
                gathered.register_hook(lambda gradient: hand_over(me(), gradient))  # type: ignore[no-untyped-call]
                self._hooked = weakref.ref(gathered)
        else:  # there will be one when the unit is gathered for the first time
            later = weakref.ref(self)

            def hook_now(*_: Any) -> None:
                handle.remove()
                if (own := later()) is not None and own._record is not None:
                    own._listen()

            handle = self.handle.unit.register_forward_pre_hook(hook_now)
