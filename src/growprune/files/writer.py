"""Write the file of a sparse model: its tensors and its manifest."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError, warn
from growprune.files.disk import replacing
from growprune.files.reader import (
    DTYPES,
    GAP_DTYPES,
    Entry,
    Gaps,
    bytes_of,
    check_blocks,
    crc32,
    open_sparse,
    write_metadata,
)
from growprune.masks.bits import encode_mask, whole
from growprune.masks.layers import Weight, prunable_weights, tensors_of
from growprune.sparse.cursor import cursor_of
from growprune.sparse.model import SparseModel, sparse_model_of
from growprune.sparse.summary import targets

MISSED = 0.01
"""How far a model may be from its target sparsity without a warning. Some methods miss it by a few weights."""


def write_file(sparse: SparseModel, path: str | os.PathLike[str]) -> None:
    """Write a sparse model to a file as `save` does, without the warning about an unfinished plan.

    If the model is sharded, all ranks must call it. The first rank writes, and holds one tensor at a time, so tensors
    are gathered twice: for their checksums, which come first in the file, and to write them.
    """
    for name, module in sparse.model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            what = f"the extra state of {name or 'the model'} ({type(module).__name__})"
            warn(f"{what} is not saved: a sparse file holds only parameters and buffers")
    sparse.notice_shards()
    ranks = sparse.ranks
    stored: Iterable[tuple[Entry, dict[str, Tensor]]] = _each_stored(sparse)
    stored = list(stored) if ranks is None else stored
    walk = stored if ranks is None else _each_stored(sparse)
    entries: list[Entry] = []
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for entry, parts in stored:
        entries.append(entry)
        shapes |= {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in parts.items()}
    failed: Exception | None = None
    if ranks is None or ranks.is_first:
        try:
            with replacing(Path(path)) as file:
                tensors = (named for _, parts in walk for named in parts.items())
                rest = {"num_edits": sparse.editor.num_edits, "aliases": tensors_of(sparse.model)[1]}
                write_safetensors(file, shapes, tensors, write_metadata(settings_of(sparse) | rest, entries))
                file.flush()
                with open_sparse(Path(file.name)) as written:  # before the file gets its name
                    written.everything()  # refuses anything that differs from what was saved
                    alive = {entry.name: entry.nnz for entry in written.prunable}
                assert alive == {entry.name: entry.nnz for entry in entries if entry.weights}, "written wrongly"
        except Exception as error:  # raised below: the other ranks wait in the walk
            failed = error
    if ranks is not None:
        for _ in walk:
            pass
        if ranks.all_reduce_sum(torch.tensor([int(failed is not None)])) and failed is None:
            raise GrowpruneError(f"the first rank could not write {path}: see its error")
    if failed is not None:
        raise failed


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


def settings_of(sparse: SparseModel) -> dict[str, Any]:
    """Return the arguments of a SparseModel, for JSON."""
    return {
        "sparsity": sparse.target_sparsity,
        "allocation": sparse.allocation,
        "pattern": sparse.pattern.name,
        "keep_dense": list(sparse.keep_dense),
        "include": list(sparse.include),
        "seed": sparse.seed,
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


def write_safetensors(
    file: BinaryIO,
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str],
) -> None:
    """Write the safetensors format. Its own `save_file` does not report why it failed, and cannot sync to disk.

    Args:
        shapes: dtype and shape of each tensor, by name.
        tensors: their names and values, in any order.
    """
    ordered = sorted(shapes.items(), key=lambda item: -item[1][0].itemsize)  # so that all are aligned
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    dtypes = DTYPES | GAP_DTYPES
    starts, end = {}, 0
    for name, (dtype, shape) in ordered:
        starts[name], end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtypes[dtype], "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name, tensor in tensors:
        file.seek(8 + len(text) + starts[name])
        file.write(bytes_of(tensor))
