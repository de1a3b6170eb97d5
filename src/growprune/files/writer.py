"""From a sparse model to the tensors and the manifest of its file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError, warn
from growprune.files.entries import DTYPES, GAP_DTYPES, Entry, Gaps, bytes_of, check_blocks, crc32, digest
from growprune.files.masks import num_mask_bytes, pack_mask, to_gaps
from growprune.masks.allocation import num_kept
from growprune.masks.bits import whole
from growprune.masks.layers import prunable_weights
from growprune.masks.patterns import Pattern
from growprune.plan import prune
from growprune.sparse.cursor import cursor_of
from growprune.sparse.internals import internals
from growprune.sparse.model import SparseModel

MISSED = 0.01
"""How far a plan may end from the sparsity of its model without a warning: some methods miss it by a few weights."""


def stored(sparse: SparseModel) -> tuple[list[Entry], dict[str, Tensor]]:
    """What a model's file says and holds. Tensors that are not prunable are not copied."""
    entries: list[Entry] = []
    stored: dict[str, Tensor] = {}
    for entry, parts in each_stored(sparse):
        entries.append(entry)
        stored |= parts
    return entries, stored


def each_stored(sparse: SparseModel) -> Iterator[tuple[Entry, dict[str, Tensor]]]:
    """One tensor of the model after the other: its entry, and what of it the file holds. All ranks go together."""
    internals(sparse).check()
    check_blocks(internals(sparse).pattern)
    _check_nothing_was_added(sparse)
    aims = targets(sparse)
    for name, tensor in tensors_of(sparse.model)[0].items():
        if tensor.dtype not in DTYPES:
            raise GrowpruneError(f"{name} is {tensor.dtype}, which a file cannot hold: convert it to another dtype")
        if any(weight.parameter == name for weight in sparse.weights):
            yield _stored_parameter(sparse, name, tensor, aims)
        else:
            tensor = whole(tensor)
            entry = Entry(name, tuple(tensor.shape), tensor.dtype, sha256=digest(tensor), crc32=crc32(tensor))
            yield entry, {name: tensor}


def _stored_parameter(
    sparse: SparseModel, name: str, parameter: Tensor, aims: Mapping[str, float | None]
) -> tuple[Entry, dict[str, Tensor]]:
    weights = tuple(weight for weight in sparse.weights if weight.parameter == name)
    mask = internals(sparse).stored[name].mask()
    values = _live_values(sparse, name, parameter)
    packed = pack_mask(mask, weights, internals(sparse).pattern, name)
    aim = [aims[weight.name] for weight in weights]
    target = None if None in aim else sum(a for a in aim if a is not None) / len(aim)
    shape, nnz = tuple(mask.shape), values.numel()
    entry = Entry(name, shape, parameter.dtype, weights, target, nnz, digest(values), crc32=crc32(values))
    entry = _with_mask(entry, packed)
    if not entry.is_sparse:
        return entry, {name: values.view(shape)}
    if (gaps := to_gaps(packed, entry, internals(sparse).pattern)) is None:
        return entry, {f"{name}.values": values, f"{name}.mask": packed}
    entry = replace(_with_mask(entry, gaps), gaps=Gaps(gaps.dtype, gaps.numel()))
    return entry, {f"{name}.values": values, f"{name}.gaps": gaps}


def _with_mask(entry: Entry, mask: Tensor) -> Entry:
    return replace(entry, mask_sha256=digest(mask), mask_crc32=crc32(mask))


def _check_nothing_was_added(sparse: SparseModel) -> None:
    """Refuse a model that its own file would not fit."""
    own = internals(sparse)
    now = prunable_weights(sparse.model, keep_dense=own.keep_dense, include=own.include)
    known = {weight.name for weight in sparse.weights}
    if added := [weight.name for weight in now if weight.name not in known]:
        raise GrowpruneError(f"{added[0]} was added after the SparseModel was made: make a new one before saving")


def describe(sparse: SparseModel, entries: Sequence[Entry]) -> dict[str, Any]:
    """The manifest."""
    own = internals(sparse)
    return {
        "sparsity": sparse.sparsity,
        "allocation": own.allocation,
        "pattern": own.pattern.name,
        "scope": own.scope.value,
        "keep_dense": list(own.keep_dense),
        "include": list(own.include),
        "seed": own.seed,
        "num_edits": own.editor.num_edits,
        "aliases": tensors_of(sparse.model)[1],
        "tensors": {entry.name: entry.to_dict() for entry in entries},
    }


def targets(sparse: SparseModel) -> dict[str, float | None]:
    """The sparsity that each weight aims at; None where weights are ranked together and only their total has one."""
    found: dict[str, float | None] = dict.fromkeys((weight.name for weight in sparse.weights), None)
    own = internals(sparse)
    for pool in own.editor.counts.pools(prune(own.whole, to=sparse.sparsity)):
        if len(pool.weights) == 1:
            groups = own.pattern.num_groups(pool.weights[0])
            is_as_asked = pool.kept == num_kept(sparse.sparsity, groups)
            found[pool.weights[0].name] = sparse.sparsity if is_as_asked else 1 - pool.kept / groups
    return found


def num_bytes(sparse: SparseModel) -> tuple[int, int]:
    """How many bytes the model's tensors take as they are, and in a sparse file, its header not counted."""
    dense = in_file = 0
    for name, tensor in tensors_of(sparse.model)[0].items():
        weights = tuple(weight for weight in sparse.weights if weight.parameter == name)
        size = alive = tensor.numel()
        mask = internals(sparse).stored[name].mask() if weights else None
        if mask is not None:
            size, alive = mask.numel(), int(torch.count_nonzero(mask))
        dense += size * tensor.element_size()
        in_file += alive * tensor.element_size()
        if mask is not None and alive < size:
            entry = Entry(name, tuple(mask.shape), tensor.dtype, weights, nnz=alive)
            in_file += _num_mask_bytes(mask, entry, internals(sparse).pattern)
    return dense, in_file


def _num_mask_bytes(mask: Tensor, entry: Entry, pattern: Pattern) -> int:
    as_bits = num_mask_bytes(entry.weights, pattern)
    if entry.nnz - entry.num_outside > as_bits // 2:  # there is a gap for each that lives, of a byte at least
        return as_bits
    gaps = to_gaps(pack_mask(mask, entry.weights, pattern, entry.name), entry, pattern)
    return as_bits if gaps is None else gaps.nbytes


def tensors_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and persistent buffers by their first names, and which other names mean the same tensors."""
    passing = set()
    for path, module in model.named_modules(remove_duplicate=False):
        passing |= {f"{path}.{local}" if path else local for local in module._non_persistent_buffers_set}
    buffers = [(n, b) for n, b in model.named_buffers(remove_duplicate=False) if n not in passing]
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *buffers]:
        if first.setdefault(id(tensor), name) == name:
            tensors[name] = tensor.detach()
        else:
            aliases[name] = first[id(tensor)]
    return tensors, aliases


def warn_of_unsaved(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            what = f"the extra state of {path or 'the model'} ({type(module).__name__})"
            warn(f"{what} is not saved: a sparse file holds parameters and buffers only")


def warn_of_unfinished(sparse: SparseModel) -> None:
    """Say so if the steps of an optimizer have not taken a model to the end of its plan, which may be what prunes it.

    Or if that plan was made for another sparsity than the model. Always in the same words: Python then tells it once
    for each line that saves.
    """
    cursor = cursor_of(sparse)
    if cursor is None or sparse.is_at_target:
        return
    if cursor.is_over:
        reached = 1 - sparse.num_alive / max(1, sparse.num_prunable)
        if abs(reached - sparse.sparsity) > MISSED:
            says = f"the plan ended at a sparsity of {reached:.3g}, but the SparseModel was made for"
            warn(f"{says} {sparse.sparsity:.4g}: give both the same")
        return
    warn(
        f"the model is saved before its plan is over, and is not at its sparsity of {sparse.sparsity:.4g}: train while "
        f"not cursor.is_over (a step that a GradScaler skips does not count), or call sparse.prune() first"
    )


def _live_values(sparse: SparseModel, name: str, parameter: Tensor) -> Tensor:
    """The live values, in row-major order, whatever the storage; its parameter must hold nothing else."""
    stored = internals(sparse).stored[name]
    values = stored.to_live(stored.parameter.detach())
    if internals(sparse).ranks is not None:
        return values  # compact, and so nothing else is there
    if torch.count_nonzero(values) != torch.count_nonzero(parameter):
        raise GrowpruneError(f"{name} is not zero everywhere its mask says it is pruned: call enforce() before saving")
    return values


def write_safetensors(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """The safetensors format. Its own `save_file` does not tell why it failed, nor lets us sync what it wrote."""
    starts = write_header(file, {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, metadata)
    for name in starts:
        file.write(bytes_of(tensors[name]))


def write_header(
    file: BinaryIO, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> dict[str, int]:
    """Write all but the tensors; by name, in order, where in the file each of them begins."""
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
