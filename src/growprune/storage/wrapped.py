"""Tensor subclasses with few operations, such as quantized optimizer state (torchao's 8-bit optimizers).

An optimizer reads and writes its state by copying, so such a tensor can always be copied to a plain tensor and back.
No class is checked by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PLAIN = Tensor.__torch_dispatch__


def is_wrapped(tensor: Tensor) -> bool:
    """True for a tensor subclass that overrides operations, except shards (DTensor), which support them all."""
    return type(tensor).__torch_dispatch__ is not _PLAIN and not hasattr(tensor, "device_mesh")


def plain(tensor: Tensor) -> Tensor:
    """Return the values of a tensor as a plain tensor. A plain tensor is returned unchanged."""
    if not is_wrapped(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@torch.no_grad()
def zero_wrapped_off(mask: Tensor, tensor: Tensor) -> None:
    """Set a wrapped tensor to zero where a mask is False, as far as it can represent zeros.

    It is written to only if that changes something, because quantizing again may round again.
    """
    values = plain(tensor)
    if bool(values.masked_fill(mask, 0).any()):
        tensor.copy_(torch.where(mask, values, 0))
