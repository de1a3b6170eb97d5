"""Packed masks, and copies of tensors with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from growprune.errors import GrowpruneError

Snapshot: TypeAlias = dict[str, tuple[Tensor, Tensor | None]]
"""By name: values, and the packed mask if the tensor is prunable."""


def pack(mask: Tensor) -> Tensor:
    """Pack a bool tensor into bytes: row-major, eight to a byte, the first in the lowest bit.

    >>> pack(torch.tensor([True, False, True, True, False, False, False, False, True])).tolist()
    [13, 1]
    """
    if mask.device.type == "cpu":
        return torch.from_numpy(np.packbits(mask.reshape(-1).numpy(), bitorder="little"))
    flat = torch.nn.functional.pad(mask.reshape(-1), (0, -mask.numel() % 8)).view(-1, 8).to(torch.uint8)
    return (flat << torch.arange(8, device=mask.device, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor. If it is sharded, this is a collective: all ranks have to call it."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def like(tensor: Tensor, values: Tensor) -> Tensor:
    """Shard values that all ranks have like a tensor; return them unchanged if it is not sharded."""
    if not hasattr(tensor, "device_mesh"):
        return values
    from torch.distributed.tensor import distribute_tensor

    here = values.to(tensor.device)
    return distribute_tensor(here, tensor.device_mesh, tensor.placements, src_data_rank=None)  # type: ignore[attr-defined]


def check_packed(packed: Tensor, shape: Sequence[int]) -> None:
    """Raise unless a packed mask has the number of bytes for this shape."""
    if packed.dtype != torch.uint8:
        raise GrowpruneError(f"a packed mask must be of dtype torch.uint8, got {packed.dtype}")
    if packed.numel() != -(-math.prod(shape) // 8):
        raise GrowpruneError(f"a mask of {packed.numel()} bytes does not fit shape {tuple(shape)}")


def unpack(packed: Tensor, shape: Sequence[int], device: torch.device | None = None) -> Tensor:
    """The inverse of `pack`, for a mask of this shape.

    >>> unpack(torch.tensor([13, 1], dtype=torch.uint8), (9,)).int().tolist()
    [1, 0, 1, 1, 0, 0, 0, 0, 1]
    """
    check_packed(packed, shape)
    packed = packed.to(device) if device is not None else packed
    if packed.device.type == "cpu":
        bools = np.unpackbits(packed.numpy(), count=math.prod(shape), bitorder="little").view(np.bool_)
        return torch.from_numpy(bools).view(tuple(shape))
    bits = (packed[:, None] >> torch.arange(8, device=packed.device, dtype=torch.uint8)) & 1
    return bits.reshape(-1)[: math.prod(shape)].bool().view(tuple(shape))
