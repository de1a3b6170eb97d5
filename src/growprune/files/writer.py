"""Write the file of a sparse model: its tensors and its manifest."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError, warn
from growprune.files.disk import replacing
from growprune.files.manifest import DTYPES, GAP_DTYPES, Entry, Gaps, bytes_of, check_blocks, crc32, write_metadata
from growprune.files.reader import open_sparse
from growprune.masks.bits import encode_mask, whole
from growprune.masks.layers import Weight, prunable_weights, tensors_of
from growprune.sparse.cursor import cursor_of
from growprune.sparse.model import SparseModel, sparse_model_of
from growprune.sparse.summary import targets

if TYPE_CHECKING:
    from growprune.sharding.handles import Ranks

MISSED = 0.01
"""How far a model may be from its target sparsity without a warning. Some methods miss it by a few weights."""


def write_file(sparse: SparseModel, path: str | os.PathLike[str]) -> None:
    """Write a sparse model to a file as `save` does, without the warning about an unfinished plan.

    Only prunable tensors are copied. If the model is sharded, all ranks must call it.
    """
    for name, module in sparse.model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            what = f"the extra state of {name or 'the model'} ({type(module).__name__})"
            warn(f"{what} is not saved: a sparse file holds only parameters and buffers")
    sparse.notice_shards()
    if sparse.ranks is not None:
        _write_sharded(sparse, Path(path), sparse.ranks)
        return
    entries: list[Entry] = []
    tensors: dict[str, Tensor] = {}
    for entry, parts in _each_stored(sparse):
        entries.append(entry)
        tensors |= parts
    with replacing(Path(path)) as file:
        write_safetensors(file, tensors, write_metadata(_settings(sparse), entries))
        _check_written(file, entries)


def _write_sharded(sparse: SparseModel, path: Path, ranks: Ranks) -> None:
    """Write the file of a sharded model from its first rank, one tensor at a time. All ranks must call it.

    Tensors are gathered twice: for their checksums, which come first in the file, and to write them.
    """
    entries: list[Entry] = []
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for entry, parts in _each_stored(sparse):
        entries.append(entry)
        shapes |= {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in parts.items()}
    walk = _each_stored(sparse)
    failed: Exception | None = None
    if ranks.is_first:
        try:
            with replacing(path) as file:
                starts = _write_header(file, shapes, write_metadata(_settings(sparse), entries))
                for _, parts in walk:
                    for name, tensor in parts.items():
                        file.seek(starts[name])
                        file.write(bytes_of(tensor))
                _check_written(file, entries)
        except Exception as error:  # raised below: the other ranks wait in the walk
            failed = error
    for _ in walk:
        pass
    is_lost = bool(ranks.all_reduce_sum(torch.tensor([int(failed is not None)])))
    if failed is not None:
        raise failed
    if is_lost:
        raise GrowpruneError(f"the first rank could not write {path}: see its error")


def _check_written(file: BinaryIO, entries: list[Entry]) -> None:
    """Read a file back and check it before it gets its name."""
    file.flush()
    with open_sparse(Path(file.name)) as written:
        written.everything()  # refuses what is not as it was saved, and counts what lives
        alive = {entry.name: entry.nnz for entry in written.prunable}
    assert alive == {entry.name: entry.nnz for entry in entries if entry.weights}, f"{file.name} was written wrongly"


def _each_stored(sparse: SparseModel) -> Iterator[tuple[Entry, dict[str, Tensor]]]:
    """Yield each tensor of the model: its entry, and the tensors stored in the file. All ranks iterate together."""
    sparse.check()
    check_blocks(sparse.pattern)
    now = prunable_weights(sparse.model, keep_dense=sparse.keep_dense, include=sparse.include)
    groups: dict[str, list[Weight]] = {}
    for weight in sparse.weights:
        groups.setdefault(weight.parameter, []).append(weight)
    if added := sorted({weight.name for weight in now} - {weight.name for weight in sparse.weights}):
        raise GrowpruneError(f"{added[0]} was added after the SparseModel was created: create a new one before saving")
    aims = targets(sparse)
    for name, tensor in tensors_of(sparse.model)[0].items():
        if tensor.dtype not in DTYPES:
            raise GrowpruneError(f"{name} has dtype {tensor.dtype}, which a file cannot store: convert it first")
        if weights := tuple(groups.get(name, ())):
            stored = sparse.stored[name]
            aim = [aims[weight.name] for weight in weights]
            target = None if None in aim else sum(a for a in aim if a is not None) / len(aim)
            mask, values = stored.mask(), stored.to_live(stored.parameter.detach())
            size = tensor.dtype.itemsize
            bits, gaps = encode_mask(mask, weights, sparse.pattern, size, name, value_bytes=values.nbytes)
            in_file, about_gaps = (bits, None) if gaps is None else (gaps, Gaps(gaps.dtype, gaps.numel()))
            about = (tuple(mask.shape), tensor.dtype, crc32(values), weights, target, values.numel(), crc32(in_file))
            entry = Entry(name, *about, about_gaps)
            if entry.is_sparse:
                yield entry, {f"{name}.values": values, entry.mask_name: in_file}
            else:
                yield entry, {name: values.view(entry.shape)}
        else:
            tensor = whole(tensor)
            yield Entry(name, tuple(tensor.shape), tensor.dtype, crc32(tensor)), {name: tensor}


def _settings(sparse: SparseModel) -> dict[str, Any]:
    """Return the manifest without the tensors."""
    return {
        "sparsity": sparse.target_sparsity,
        "allocation": sparse.allocation,
        "pattern": sparse.pattern.name,
        "keep_dense": list(sparse.keep_dense),
        "include": list(sparse.include),
        "seed": sparse.seed,
        "num_edits": sparse.editor.num_edits,
        "aliases": tensors_of(sparse.model)[1],
    }


def check_finished(model: SparseModel | nn.Module, done: str = "saved") -> None:
    """Raise if pruned weights of a model are not zero. Warn if it is not at its target sparsity, with the reason.

    The words are always the same for one model, so that Python warns once for each line that saves.

    Args:
        model: a SparseModel, or a module, which may own one.
        done: what is done with the model.
    """
    sparse = model if isinstance(model, SparseModel) else sparse_model_of(model)
    if sparse is None:
        return
    sparse.check_zeros()
    cursor = cursor_of(sparse)
    if sparse.is_at_target or sparse.sparsity >= sparse.target_sparsity - MISSED:
        return
    target, before = f"not at its target sparsity of {sparse.target_sparsity:.4g}", f"before it is {done}"
    if cursor is None or cursor.is_over:
        warn(f"the {done} model has sparsity {sparse.sparsity:.3g}, {target}: call sparse.prune() {before}")
    elif cursor.position < 0:
        warn(f"the {done} model is {target}: its plan never began. Call cursor.attach(optimizer) before training")
    else:
        warn(
            f"the {done} model is {target}: its plan is not over. Train to its end (steps that GradScaler skips do not "
            f"count), or call prune() of the SparseModel {before}"
        )


def write_safetensors(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write the safetensors format. Its own `save_file` does not report why it failed, and cannot sync to disk."""
    starts = _write_header(file, {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, metadata)
    for name in starts:
        file.write(bytes_of(tensors[name]))


def _write_header(
    file: BinaryIO, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> dict[str, int]:
    """Write the header. Return the offset of each tensor in the file, by name, in order."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1][0].itemsize)  # so that all are aligned
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    dtypes = DTYPES | GAP_DTYPES
    starts, end = {}, 0
    for name, (dtype, shape) in ordered:
        starts[name], end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtypes[dtype], "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    return {name: 8 + len(text) + start for name, start in starts.items()}
