"""The layout of a compact parameter: its mask in bits, and the conversion of values to dense and back."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from growprune.storage import kernels
from growprune.storage.blocks import LiveBlocks


@dataclass(eq=False)
class Layout:
    """The positions of one parameter's live values."""

    shape: torch.Size
    bits: Tensor
    offsets: Tensor
    num_alive: int
    group: int
    """The number of consecutive elements that are live or dead together, and share a bit."""
    is_folded: bool
    """True if elements are ordered kernel position by kernel position, as in blocks of a convolution."""
    blocks: LiveBlocks | None = None
    """The positions of its live blocks, if the pattern has blocks that products support."""

    @classmethod
    def of(cls, mask: Tensor, group: int) -> Layout:
        is_folded = group > 1 and mask.dim() > 2
        flat = (mask.movedim(1, -1) if is_folded else mask).reshape(-1)
        bits = kernels.pack(flat, group=group)
        offsets, num_groups = kernels.block_offsets(bits)
        return cls(mask.shape, bits, offsets, num_groups * group, group, is_folded)

    @classmethod
    def of_packed(cls, packed: Tensor, shape: torch.Size, group: int, *, keep: bool = False) -> Layout | None:
        """Return the layout of a packed mask, without unpacking it; None if values must be reordered.

        Args:
            keep: keep the given mask without a copy, if possible.
        """
        is_folded = group > 1 and len(shape) > 2
        if (is_folded and shape[2:].numel() > 1) or (group > 1 and group % 8):
            return None
        if group > 1:
            octets = packed.cpu().numpy().reshape(-1, group // 8)
            if not ((octets == octets[:, :1]).all() and ((octets[:, 0] == 0) | (octets[:, 0] == 0xFF)).all()):
                return None
            packed = torch.from_numpy(np.packbits(octets[:, 0] == 0xFF, bitorder="little")).to(packed.device)
        is_padded = packed.numel() % (kernels.BLOCK // 8) == 0
        bits = packed if keep and is_padded else kernels.padded_copy(packed, to=kernels.BLOCK // 8)
        offsets, num_groups = kernels.block_offsets(bits)
        return cls(shape, bits, offsets, num_groups * group, group, is_folded)

    def __post_init__(self) -> None:
        self._numel = self.shape.numel()
        self.recorder: weakref.ref[Any] | None = None
        """The sparse parameter that may record dense gradients. A copy has none."""

    def to(self, device: torch.device) -> Layout:
        """Return the layout on another device."""
        if self.bits.device != device:
            self.bits, self.offsets = self.bits.to(device), self.offsets.to(device)
            self.blocks = None if self.blocks is None else self.blocks.to(device)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        blocks = None if self.blocks is None else self.blocks.clone()
        copied = replace(self, bits=self.bits.clone(), offsets=self.offsets.clone(), blocks=blocks)
        memo[id(self)] = copied
        return copied

    def mask(self) -> Tensor:
        return self._unfold(kernels.unpack(self.bits, self.shape.numel(), group=self.group))

    def expand(self, values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the dense tensor of live values."""
        here = self.to(values.device)
        flat = kernels.expand(values, here.bits, here.offsets, self._numel, dtype or values.dtype, self.group)
        return self._unfold(flat)

    def compress(self, dense: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the live values of a dense tensor."""
        here = self.to(dense.device)
        flat = (dense.movedim(1, -1) if self.is_folded else dense).reshape(-1)
        return kernels.compress(flat, here.bits, here.offsets, self.num_alive, dtype or dense.dtype, self.group)

    def _unfold(self, flat: Tensor) -> Tensor:
        if not self.is_folded:
            return flat.view(self.shape)
        folded = (self.shape[0], *self.shape[2:], self.shape[1])
        # of a 1x1 convolution, contiguous() would keep the strides of channels_last, with which torch rounds otherwise
        return flat.view(folded).movedim(-1, 1).reshape(-1).view(self.shape)
