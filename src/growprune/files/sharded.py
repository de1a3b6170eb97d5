"""Sparse files of sharded models: the first rank streams them, tensor by tensor, and all ranks read them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.files.atomic import replacing
from growprune.files.entries import Entry, bytes_of
from growprune.files.reader import open_sparse
from growprune.files.versions import write_metadata
from growprune.files.writer import describe, each_stored, write_header
from growprune.sparse.internals import internals
from growprune.sparse.model import SparseModel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from growprune.sharding.ranks import Ranks


def save_sharded(sparse: SparseModel, path: Path, ranks: Ranks) -> None:
    """Write the file of a sharded model. Tensors are gathered twice: for their digests, which come first, and then."""
    entries: list[Entry] = []
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for entry, parts in each_stored(sparse):
        entries.append(entry)
        shapes |= {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in parts.items()}
    walk = each_stored(sparse)
    failed: OSError | None = None
    if ranks.is_first:
        try:
            _write(sparse, path, entries, shapes, walk)
        except OSError as error:
            failed = error
    for _ in walk:  # others wait in it, whatever has happened to the one who writes
        pass
    is_lost = bool(ranks.any(torch.tensor([failed is not None])))
    if failed is not None:
        raise failed
    if is_lost:
        raise GrowpruneError(f"the first rank could not write {path}: see its error")


def _write(sparse: SparseModel, path: Path, entries: list[Entry], shapes: Any, walk: Any) -> None:
    with replacing(path) as file:
        starts = write_header(file, shapes, write_metadata(describe(sparse, entries)))
        for _, parts in walk:
            for name, tensor in parts.items():
                file.seek(starts[name])
                file.write(bytes_of(tensor))
        check_written(file, entries)


def check_written(file: BinaryIO, entries: list[Entry]) -> None:
    """Read a file back before it takes its name."""
    file.flush()
    with open_sparse(Path(file.name), thorough=True) as written:
        written.everything()  # refuses what is not as it was saved, and counts what lives
        alive = {entry.name: entry.nnz for entry in written.prunable}
    assert alive == {entry.name: entry.nnz for entry in entries if entry.weights}, f"{file.name} was written wrongly"


def restore_sharded(
    sparse: SparseModel,
    tensors: Mapping[str, tuple[Tensor, Tensor | None]],
    mesh: DeviceMesh,
    sharding: Mapping[str, Any],
) -> None:
    """Fill a model from a file, of which tensors are views, and shard each unit of it as soon as it is filled."""
    from growprune.sharding import UnitByUnit  # FSDP2 takes a second to load

    building = internals(sparse)
    shards = UnitByUnit(building, mesh, **sharding)
    names = {id(tensor): name for name, tensor in _named(sparse.model)}
    for module in reversed(list(sparse.model.modules())):  # inner ones first
        own = [names.pop(id(t), "") for t in (*module._parameters.values(), *module._buffers.values())]
        building.restore_some({name: tensors[name] for name in own if name in tensors})
        shards.done(module)
    building.notice_shards()


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
