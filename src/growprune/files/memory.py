"""Giving a model memory: for those built on the meta device, which are then filled from a file."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn


def give_memory(model: nn.Module, *, but: Collection[str] = ()) -> None:
    """Put what lies on the meta device on the CPU, with any content; what is tied stays tied.

    Args:
        but: names of tensors that stay as they are.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for path, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for local, old in tensors.items():
                if old is not None and old.is_meta and (f"{path}.{local}" if path else local) not in but:
                    _, new = made.setdefault(id(old), (old, _real(old)))  # the old one stays, and its id its own
                    tensors[local] = new


def _real(old: Tensor) -> Tensor:
    if old.is_contiguous():
        new = torch.empty(old.shape, dtype=old.dtype, device="cpu")
    else:
        new = torch.empty_like(old, device="cpu")  # of a meta tensor, this imports sympy, which takes a second
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
