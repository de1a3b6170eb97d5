"""Save and load sparse files, in which pruned weights take no space. docs/file-format.md specifies the format."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.files.reader import FORMAT, VERSION, match_model, open_sparse
from growprune.files.writer import check_finished, write_file
from growprune.masks.bits import MAX_EXPANSION, num_mask_bytes
from growprune.sparse.model import SparseModel, check_sparse_model, named_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def save(sparse: SparseModel, path: str | os.PathLike[str]) -> None:
    """Write a sparse model to a file, atomically: on failure, an existing file is unchanged.

    The file is read back and checked before it is renamed to `path`. If the model is sharded, all ranks must call it.
    The first rank writes, and holds at most one tensor of the model at a time.
    """
    check_sparse_model(sparse, "save")
    sparse.notice_shards()
    check_finished(sparse)
    write_file(sparse, path)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    storage: str = "masked",
    mapped: bool = False,
    mesh: DeviceMesh | None = None,
    sharding: Mapping[str, Any] | None = None,
) -> SparseModel:
    """Fill a model from a sparse file, and return it as the SparseModel that was saved, ready for training.

    The file is fully checked before the model is changed. Tensors on the meta device are created on the CPU; with
    compact storage, only the live values of sparse weights.

    Args:
        path: a file that `save` wrote.
        model: a model of the same class, with any weights.
        storage: how sparse weights are stored; see SparseModel. It may differ from that of the saved model.
        mapped: with compact storage, keep live values memory-mapped to the file, which is faster, and copy them when
            training writes to them. No process may write into the file meanwhile. `save` is safe: it replaces the file.
        mesh: shard the model over its ranks, each unit as soon as it is filled; needs storage="compact".
        sharding: further arguments of `SparseModel.shard`.
    """
    if mesh is None and sharding:
        raise GrowpruneError(f"sharding={dict(sharding)} needs a mesh to shard over: pass mesh= too")
    with open_sparse(path) as file:
        match_model(file, model)
        is_compact = storage == "compact"
        tensors = file.everything(copied=is_compact and not mapped and mesh is None)
        if storage == "masked":
            _give_memory(model)
        sparse = file.make_sparse(model, storage)
        _give_memory(model, but={entry.name for entry in file.prunable})
        if mesh is None:
            sparse.restore(tensors, keep=is_compact)
        else:
            from growprune.sharding import UnitByUnit  # FSDP2 takes a second to load

            shards = UnitByUnit(sparse, mesh, **(sharding or {}))
            names = {id(tensor): name for name, tensor in named_tensors(sparse.model).items()}
            for module in reversed(list(sparse.model.modules())):  # inner ones first
                own = [names.pop(id(t), "") for t in (*module._parameters.values(), *module._buffers.values())]
                sparse.restore_some({name: tensors[name] for name in own if name in tensors})
                shards.done(module)
            sparse.notice_shards()
        sparse.skip(file.num_edits)
    return sparse


def read(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the sparse file at `path` as a dense state dict, like `state_dict()` of the saved model."""
    with open_sparse(path) as file:
        size, limit = sum(entry.num_bytes for entry in file.entries.values()), MAX_EXPANSION * file.num_bytes
        if size > limit:
            file.refuse(f"would need {size} bytes, over {MAX_EXPANSION} times its size", "load it into its model")
        tensors = file.each(file.dense)
        return tensors | {alias: tensors[first] for alias, first in file.aliases.items()}


def manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the manifest of the sparse file at `path` (see docs/file-format.md) and totals. Reads only the header."""
    with open_sparse(path) as file:
        totals = {
            "elements": sum(entry.numel for entry in file.entries.values()),
            "prunable": sum(entry.numel - entry.num_outside for entry in file.prunable),
            "prunable_nnz": sum(entry.nnz - entry.num_outside for entry in file.prunable),
            "bytes": file.num_bytes,
            "dense_bytes": sum(entry.num_bytes for entry in file.entries.values()),
        }
        return {"format": FORMAT, "version": VERSION, **file.manifest, "totals": totals}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a sparse file, read and checked in full."""

    name: str
    shape: tuple[int, ...]
    is_prunable: bool
    alive: int
    """The number of live elements; all of them if it is not prunable."""
    num_bytes: int
    """The bytes of values and mask in the file."""
    state: Literal["ok", "damaged"]
    """The result of the check: "ok" if its bytes match the saved checksums."""

    @property
    def sparsity(self) -> float:
        size = math.prod(self.shape)
        return 1 - self.alive / size if size else 0.0

    @property
    def bytes_per_live(self) -> float:
        return self.num_bytes / self.alive if self.alive else 0.0


def contents(path: str | os.PathLike[str]) -> list[StoredTensor]:
    """List the tensors of a sparse file, in order. Reads and checks all of it; damage is reported, not raised."""
    with open_sparse(path) as file:
        found = []
        for entry in file.entries.values():
            state: Literal["ok", "damaged"] = "ok"
            try:
                file.values(entry)
                if entry.weights:
                    file.bits(entry)
            except GrowpruneError:
                state = "damaged"
            num_bytes = entry.num_value_bytes
            if entry.gaps is not None:
                num_bytes += entry.gaps.length * entry.gaps.dtype.itemsize
            elif entry.is_sparse:
                num_bytes += num_mask_bytes(entry.weights, file.pattern)
            alive = entry.nnz if entry.weights else entry.numel
            found.append(StoredTensor(entry.name, entry.shape, bool(entry.weights), alive, num_bytes, state))
        return found


def _give_memory(model: nn.Module, *, but: Collection[str] = ()) -> None:
    """Allocate tensors from the meta device on the CPU, uninitialized. Tied tensors stay tied.

    Args:
        but: names of tensors to skip.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for path, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for local, old in tensors.items():
                if old is None or not old.is_meta or (f"{path}.{local}" if path else local) in but:
                    continue
                if id(old) not in made:
                    if old.is_contiguous():
                        new = torch.empty(old.shape, dtype=old.dtype, device="cpu")
                    else:  # not with its strides, which may repeat numbers; imports sympy, which takes a second
                        new = torch.empty_like(old, device="cpu")
                    is_parameter = isinstance(old, nn.Parameter)
                    # keeping `old` keeps its id unique
                    made[id(old)] = old, nn.Parameter(new, old.requires_grad) if is_parameter else new
                setattr(module, local, made[id(old)][1])  # recurrent layers keep their parameters twice
