"""Sharded masks: each rank keeps a part of a layer's bits, and gathers all of them while the layer computes.

All ranks compute the same layers in the same order, so each layer's bits are gathered on demand. They are kept until
another layer's are gathered: the forward pass of a layer gathers once, and so do both products of its backward pass.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.sharding.ranks import Ranks
from growprune.storage.compact_modules import layouts_of, set_layout
from growprune.storage.layout import Layout


class ShardedLayout(Layout):
    """A `Layout` of which this rank has a part. Reading its bits is a collective: all ranks must do it."""

    _last: tuple[weakref.ref[ShardedLayout], Tensor] | None = None
    """The layout that was gathered last, with its bits and offsets, as bytes."""

    def __init__(self, whole: Layout, ranks: Ranks) -> None:
        self.shape, self.num_alive, self.blocks = whole.shape, whole.num_alive, whole.blocks
        self.group, self.is_folded = whole.group, whole.is_folded
        self._ranks, self._device, self._num_bytes = ranks, whole.bits.device, whole.bits.numel()
        octets = torch.cat([whole.bits, whole.offsets.view(torch.uint8)])
        self._total = octets.numel()
        step = -(-self._total // ranks.size)
        self._own = nn.functional.pad(ranks.cut(octets), (0, step - ranks.cut(octets).numel())).clone()
        self._numel = self.shape.numel()
        self._quick = _Never()

    @property
    def num_bytes_here(self) -> int:
        return self._own.numel()

    @property
    def bits(self) -> Tensor:  # type: ignore[override]
        return self._gathered()[: self._num_bytes]

    @property
    def offsets(self) -> Tensor:  # type: ignore[override]
        return self._gathered()[self._num_bytes : self._total].view(torch.int64)

    def _gathered(self) -> Tensor:
        if torch.compiler.is_compiling():  # which then runs the layer eagerly, if it may
            raise GrowpruneError("torch.compile does not support sharded masks: remove torch.compile or masks=True")
        last = ShardedLayout._last
        if last is not None and last[0]() is self and last[1].device == self._device:
            return last[1]
        ShardedLayout._last = None  # its memory can be had again
        octets = self._ranks.join_alike(self._own).to(self._device)
        ShardedLayout._last = weakref.ref(self), octets
        return octets

    def to(self, device: torch.device) -> Layout:
        if self._device != device:
            self._own, self._device = self._own.to(device), device
            self.blocks = None if self.blocks is None else self.blocks.to(device)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        blocks = None if self.blocks is None else self.blocks.clone()
        bits, offsets = self.bits.clone(), self.offsets.clone()
        copied = Layout(self.shape, bits, offsets, self.num_alive, self.group, self.is_folded, blocks)
        memo[id(self)] = copied
        return copied


class _Never(dict[tuple[Any, ...], Any]):
    """A cache that stores nothing: a cached kernel call would keep all bits in memory."""

    def __contains__(self, key: object) -> bool:
        return True


def sharded_layout(layout: Layout | None, ranks: Ranks) -> Layout | None:
    """Shard a layout over the ranks. None and a sharded layout are returned unchanged."""
    return layout if layout is None or isinstance(layout, ShardedLayout) else ShardedLayout(layout, ranks)


def shard_masks(module: nn.Module, ranks: Ranks) -> None:
    """Keep only this rank's part of the masks of all compact layers in a module."""
    for inner in module.modules():
        for local, layout in layouts_of(inner).items():
            if (cut := sharded_layout(layout, ranks)) is not layout:
                set_layout(inner, local, cut)
