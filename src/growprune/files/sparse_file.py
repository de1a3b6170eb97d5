"""The sparse file: a model whose dead weights take no space. This page is its specification.

A sparse file is a safetensors file: 8 bytes that give the length of the header (little-endian), the header (JSON),
and the bytes of the tensors, each row-major and little-endian. Reading it runs no code.

**Tensors.** Every parameter and persistent buffer of the model is in the file once, by its first name in the
model's `state_dict`. A parameter that is prunable and not all alive is *sparse*, and is stored as two tensors; every
other is *dense*, and is stored under its plain name.

    <name>.values   1-D, the parameter's dtype: its live values, in row-major order of the parameter
    <name>.mask     1-D, uint8: which weights live, one bit each (or one a block, see below). Bit i is bit i % 8 of
                    byte i // 8, counted from the lowest. What is left over in the last byte is 0
    <name>.gaps     in place of the mask, where that takes few bytes: 1-D, uint8 or uint16. The same bits: for each that
                    is set, in order, how many are not since the one before it, or since the first. The largest number
                    (255, 65535) is so many that are not set, with none that is behind them: 300 is 255, 45, and 255 is
                    255, 0. Behind the last number no bit is set

**Bits.** A prunable parameter is one or more *matrices*, each a range [start, stop) of its dimension 0; attention's
`in_proj_weight` has three, for q, k and v. If the parameter is `stacked`, as experts are, a matrix is a single index of
dimension 0, and has one dimension less. The bits of the matrices follow one another without a gap. What lies in no
matrix is alive and has no bits. The bits of one matrix are, by the file's pattern:

    unstructured, N:M   one a weight, in row-major order
    AxB                 one a block. If the parameter is `transposed`, its dimensions 0 and 1 are swapped. Then
                        dimension 1 goes last, and all but dimension 0 are flattened, so that (out, in, kh, kw) becomes
                        (out, kh * kw * in); a 1-D parameter becomes a single column. Blocks of A rows x B columns are
                        laid on from the top left, overhanging at the right and the bottom, and are read row by row of
                        blocks. A and B are at most 1024

**Gaps or bits.** Blocks have bits. Any other mask has gaps if they take at most half the bytes of its bits, those
of uint16 only if they are the shorter ones. And a tensor with gaps must not take over 1000 times its bytes in the
file when it is dense, so that a small file cannot ask for any amount of memory: a mask so empty has bits.

**Metadata.** Four strings in the header's `__metadata__`: `format` is "growprune", `version` is "3" if any tensor has
gaps, and "2" if none has, `manifest` is a JSON object, and `manifest_sha256` is the SHA-256 of that string's UTF-8
bytes. The manifest has

    sparsity, allocation, pattern, scope, keep_dense, include, seed   the arguments of the SparseModel; names and globs
                are of at most 1000 characters
    num_edits   how many edits it has had, so that random edits to come draw new numbers
    aliases     {other name: first name} of tensors that the model has under several names
    tensors     {name: about}. All have
                    shape        of the dense tensor
                    dtype        as safetensors writes it: F32, BF16, ...
                    sha256       of the bytes of <name>, or of <name>.values if it is sparse
                    crc32        of the same bytes, as zlib has it, a number; left out in older files
                Those that are prunable have as well
                    matrices     [[start, stop], ...] in order
                    transposed   whether the matrices are stored (in, out, ...)
                    stacked      true if dimension 0 counts the matrices; left out otherwise
                    target       the sparsity aimed at; null where layers are ranked together
                    nnz          how many weights live (one that lives may be 0, as grown weights are at first)
                    mask_sha256  of the bytes of <name>.mask (which a dense one would have), or of <name>.gaps
                    mask_crc32   of the same bytes; left out in older files
                    gaps         [dtype, length] of <name>.gaps: "U8" or "U16"; left out if there are none

**Digests.** A SHA-256 is written as 64 lowercase hexadecimal digits. They tell damage, not forgery: a reader refuses a
file whose manifest, values or masks are not those that were saved, or whose tensors were exchanged. What they leave
open is the order of the tensors' bytes, and the spaces in the header. `manifest` checks the manifest only; `load` and
`read` check everything: by CRC-32 where it is there, as it takes half the time, and by SHA-256 elsewhere. `growprune
inspect` and `save`, which reads back what it wrote, check both.

**Version 2** is the same, without gaps, and is written where there are none: those who read version 2 only can read it.

**Version 1** has no `manifest_sha256` and no `sha256`, so that only damage to masks is noticed. In its manifest,
`include` is called "also", and the pattern "unstructured" is called "free". All else is as above. It is read, and no
longer written. A reader refuses a version that it does not know.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.files.atomic import replacing
from growprune.files.entries import MAX_EXPANSION
from growprune.files.memory import give_memory
from growprune.files.reader import match_model, open_sparse
from growprune.files.sharded import check_written, restore_sharded, save_sharded
from growprune.files.versions import FORMAT, write_metadata
from growprune.files.writer import describe, stored, warn_of_unfinished, warn_of_unsaved, write_safetensors
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
    if own.ranks is not None:
        save_sharded(sparse, path, own.ranks)
        return
    entries, tensors = stored(sparse)
    metadata = write_metadata(describe(sparse, entries))
    with replacing(path) as file:
        write_safetensors(file, tensors, metadata)
        check_written(file, entries)


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
            give_memory(model)
        sparse = file.make_sparse(model, storage)
        give_memory(model, but={entry.name for entry in file.prunable})
        if mesh is None:
            internals(sparse).restore(tensors, keep=is_compact)
        else:
            restore_sharded(sparse, tensors, mesh, sharding or {})
        internals(sparse).editor.num_edits = file.num_edits
    return sparse


def read(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a sparse file, dense, by name: what `state_dict` of the model that was saved would give."""
    with open_sparse(path) as file:
        size, limit = sum(entry.num_bytes for entry in file.entries.values()), MAX_EXPANSION * file.num_bytes
        if size > limit:
            file.refuse(f"would take {size} bytes, over {MAX_EXPANSION} times its size", "load it into its model")
        tensors = file.each(file.dense)
        return tensors | {alias: tensors[first] for alias, first in file.aliases.items()}


def manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What is in a sparse file (see this module's docstring), and the totals. Reads and checks the header only.

    Of a file of version 1 too, in the words of the others; `sha256` is None there.
    """
    with open_sparse(path) as file:
        totals = {
            "elements": sum(entry.numel for entry in file.entries.values()),
            "prunable": sum(entry.numel - entry.num_outside for entry in file.prunable),
            "prunable_nnz": sum(entry.nnz - entry.num_outside for entry in file.prunable),
            "bytes": file.num_bytes,
            "dense_bytes": sum(entry.num_bytes for entry in file.entries.values()),
        }
        return {"format": FORMAT, "version": file.version, **file.manifest, "totals": totals}
