"""Save and load the sparse file: a model whose pruned weights take no space. docs/file-format.md specifies it."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.files.manifest import FORMAT, Entry
from growprune.files.reader import SparseFile, match_model, open_sparse
from growprune.files.writer import warn_of_unfinished, warn_of_unsaved, write, write_sharded
from growprune.masks.encoding import MAX_EXPANSION, num_mask_bytes
from growprune.sparse import sharded
from growprune.sparse.checks import named_tensors
from growprune.sparse.internals import internals
from growprune.sparse.model import SparseModel, check_sparse_model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def save(sparse: SparseModel, path: str | os.PathLike[str]) -> None:
    """Write a sparse model to a file, all at once: if that fails, an old file of that name is as it was.

    What was written is read back, checked and counted before it takes the name. If the model is sharded, all ranks call
    it; the first writes, and has no more than one tensor of the model at a time.
    """
    check_sparse_model(sparse, "save")
    path = Path(path)
    warn_of_unsaved(sparse.model)
    own = internals(sparse)
    own.notice_shards()
    warn_of_unfinished(sparse)
    if own.ranks is None:
        write(sparse, path)
    else:
        write_sharded(sparse, path, own.ranks)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    storage: str = "masked",
    mapped: bool = False,
    mesh: DeviceMesh | None = None,
    sharding: Mapping[str, Any] | None = None,
) -> SparseModel:
    """Fill a model from a sparse file, and return it as the SparseModel that was saved, ready to train on.

    The file is checked in full before the model is touched. What of the model lies on the meta device comes to lie on
    the CPU; of sparse weights with compact storage, only what lives.

    Args:
        storage: how sparse weights are stored, see SparseModel; whatever it was when the file was saved.
        mapped: with compact storage, leave what lives in the file, which is quicker, and let training copy what it
            writes to. Nobody may write into the file meanwhile; `save` does not, it puts a new one in its place.
        mesh: shard the model over its ranks, each unit as soon as it is filled; needs storage="compact".
        sharding: further arguments of `SparseModel.shard`.
    """
    if mesh is None and sharding:
        raise GrowpruneError(f"sharding is {dict(sharding)}, but there is no mesh to shard over: give mesh too")
    with open_sparse(path) as file:
        match_model(file, model)
        is_compact = storage == "compact"
        tensors = file.everything(copied=is_compact and not mapped and mesh is None)
        if storage == "masked":
            _give_memory(model)
        sparse = file.make_sparse(model, storage)
        _give_memory(model, but={entry.name for entry in file.prunable})
        if mesh is None:
            internals(sparse).restore(tensors, keep=is_compact)
        else:
            _restore_sharded(sparse, tensors, mesh, sharding or {})
        internals(sparse).editor.num_edits = file.num_edits
    return sparse


def _restore_sharded(
    sparse: SparseModel,
    tensors: Mapping[str, tuple[Tensor, Tensor | None]],
    mesh: DeviceMesh,
    sharding: Mapping[str, Any],
) -> None:
    """Fill a model from views of a file, and shard each unit as soon as it is filled."""
    building = internals(sparse)
    shards = sharded.sharding().UnitByUnit(building, mesh, **sharding)
    names = {id(tensor): name for name, tensor in named_tensors(sparse.model).items()}
    for module in reversed(list(sparse.model.modules())):  # inner ones first
        own = [names.pop(id(t), "") for t in (*module._parameters.values(), *module._buffers.values())]
        building.restore_some({name: tensors[name] for name in own if name in tensors})
        shards.done(module)
    building.notice_shards()


def read(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a sparse file, dense, by name: what `state_dict` of the model that was saved would give."""
    with open_sparse(path) as file:
        size, limit = sum(entry.num_bytes for entry in file.entries.values()), MAX_EXPANSION * file.num_bytes
        if size > limit:
            file.refuse(f"would take {size} bytes, over {MAX_EXPANSION} times its size", "load it into its model")
        tensors = file.each(file.dense)
        return tensors | {alias: tensors[first] for alias, first in file.aliases.items()}


def manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What is in a sparse file (see docs/file-format.md), and the totals. Reads and checks the header only."""
    with open_sparse(path) as file:
        totals = {
            "elements": sum(entry.numel for entry in file.entries.values()),
            "prunable": sum(entry.numel - entry.num_outside for entry in file.prunable),
            "prunable_nnz": sum(entry.nnz - entry.num_outside for entry in file.prunable),
            "bytes": file.num_bytes,
            "dense_bytes": sum(entry.num_bytes for entry in file.entries.values()),
        }
        return {"format": FORMAT, "version": file.version, **file.manifest, "totals": totals}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a sparse file, read and checked in full."""

    name: str
    shape: tuple[int, ...]
    is_prunable: bool
    alive: int
    """How many elements live; all of them if it is not prunable."""
    num_bytes: int
    """In the file: values and mask."""
    dense_bytes: int
    state: Literal["ok", "damaged"]
    """Whether its bytes have the digests that were saved with them."""

    @property
    def sparsity(self) -> float:
        size = math.prod(self.shape)
        return 1 - self.alive / size if size else 0.0


def contents(path: str | os.PathLike[str]) -> list[StoredTensor]:
    """The tensors of a sparse file, in its order. Reads and checks all of it; damage is reported, not raised."""
    with open_sparse(path, thorough=True) as file:
        return [_stored(file, entry) for entry in file.entries.values()]


def _stored(file: SparseFile, entry: Entry) -> StoredTensor:
    alive = entry.nnz if entry.weights else entry.numel
    num_bytes = alive * entry.dtype.itemsize
    if entry.gaps is not None:
        num_bytes += entry.gaps.length * entry.gaps.dtype.itemsize
    elif entry.is_sparse:
        num_bytes += num_mask_bytes(entry.weights, file.pattern)
    try:
        file.values(entry)
        file.bits(entry)
        state: Literal["ok", "damaged"] = "ok"
    except GrowpruneError:
        state = "damaged"
    return StoredTensor(entry.name, entry.shape, bool(entry.weights), alive, num_bytes, entry.num_bytes, state)


def live_tensor(path: str | os.PathLike[str], name: str) -> tuple[Tensor, Tensor]:
    """The live values of a prunable tensor in row-major order, and one bit for each of its weights; all is checked.

    Bits are eight to a byte, the first in the lowest. No dense tensor is made, and no mask of bools unless the pattern
    has blocks.
    """
    with open_sparse(path) as file:
        if name not in file.entries or not file.entries[name].weights:
            raise GrowpruneError(f"{path} has no prunable tensor {name!r}: give a name of its manifest")
        values, bits = file.values(file.entries[name]), file.bits(file.entries[name])
        return values.clone(), bits.clone()  # views of a file would be lost if the file is written to


def _give_memory(model: nn.Module, *, but: Collection[str] = ()) -> None:
    """Put what lies on the meta device on the CPU, with any content; tied tensors stay tied.

    Args:
        but: names of tensors that stay as they are.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for path, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for local, old in tensors.items():
                if old is not None and old.is_meta and (f"{path}.{local}" if path else local) not in but:
                    _, new = made.setdefault(id(old), (old, _real(old)))  # keeping `old` keeps its id unique
                    tensors[local] = new


def _real(old: Tensor) -> Tensor:
    if old.is_contiguous():
        new = torch.empty(old.shape, dtype=old.dtype, device="cpu")
    else:
        new = torch.empty_like(old, device="cpu")  # of a meta tensor, this imports sympy, which takes a second
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
