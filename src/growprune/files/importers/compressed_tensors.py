"""compressed-tensors: "sparse-bitmask" and "sparse-24-bitmask", in safetensors.

A parameter `fc.weight` is stored as

    fc.compressed     the non-zero values, row-major; for 2:4, (rows, columns / 2)
    fc.bitmask        uint8, (..., ceil(columns / 8)): each row on its own, the first column in the lowest bit
    fc.shape          the shape of the dense tensor
    fc.row_offsets    where the values of each row begin; not for 2:4
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.files.importers.contents import Contents
from growprune.files.importers.imported import Imported
from growprune.masks.bits import pack, unpack
from growprune.storage.kernels import scatter_live

VALUES, BITS, SHAPE, OFFSETS = ".compressed", ".bitmask", ".shape", ".row_offsets"


def read_compressed_tensors(contents: Contents) -> Imported | None:
    stems = [name.removesuffix(VALUES) for name in contents.tensors if name.endswith(VALUES)]
    stems = [stem for stem in stems if stem + BITS in contents.tensors and stem + SHAPE in contents.tensors]
    if not stems:
        return None
    parts = {stem + end for stem in stems for end in (VALUES, BITS, SHAPE, OFFSETS)}
    tensors = {name: tensor for name, tensor in contents.tensors.items() if name not in parts}
    masks: dict[str, Tensor] = {}
    for stem in stems:
        name = stem if stem.endswith(".weight") else f"{stem}.weight"  # early versions kept the word
        if name in tensors:
            _refuse(contents, f"has {name} both compressed and dense")
        tensors[name], mask = _decompress(contents, stem)
        if mask.ndim >= 2 and not mask.all():
            masks[name] = mask
    return Imported("compressed-tensors", tensors, masks, notes=contents.notes)


def _decompress(contents: Contents, stem: str) -> tuple[Tensor, Tensor]:
    shape = [int(length) for length in contents.tensors[stem + SHAPE].flatten()[:64].tolist()]
    values, packed = contents.tensors[stem + VALUES].flatten(), contents.tensors[stem + BITS]
    if not shape or min(shape) < 0 or packed.dtype != torch.uint8:
        _refuse(contents, f"has {stem} with shape {shape} and a bitmask of {packed.dtype}")
    if packed.numel() != math.prod(shape[:-1]) * -(-shape[-1] // 8):
        _refuse(contents, f"has {stem} with shape {shape}, but a bitmask of {packed.numel()} bytes")
    rows, columns = math.prod(shape[:-1]), shape[-1]
    padded = unpack(packed.flatten(), (rows, -(-columns // 8) * 8))
    mask = padded[:, :columns].reshape(shape)
    if (alive := int(torch.count_nonzero(mask))) != values.numel():
        _refuse(contents, f"has {stem} with {values.numel()} values, but {alive} bits")
    dense = torch.empty(mask.numel(), dtype=values.dtype)
    scatter_live(dense, torch.empty(mask.numel(), dtype=torch.bool), values, pack(mask))
    return dense.view(shape), mask


def _refuse(contents: Contents, why: str) -> None:
    raise GrowpruneError(f"{contents.where} {why}: it is damaged, download or save it again")
