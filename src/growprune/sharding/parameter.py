"""A compact parameter with sharded live values. Each rank has a chunk of them, and the whole mask."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from growprune.sharding.handles import Handle
from growprune.storage.compact import Compact, set_layout
from growprune.storage.compact_layers import hand_over
from growprune.storage.kernels import Layout


class ShardedCompact(Compact):
    """A `Compact` parameter that is sharded. Its methods are collectives: all ranks must call them.

    Values and optimizer state are gathered for one parameter at a time, and only for an edit.
    """

    def __init__(self, compact: Compact, handle: Handle) -> None:
        self.__dict__.update(compact.__dict__)
        self.handle = handle
        self._is_trained = handle.parameter.requires_grad
        self._ask_for_gradients()
        self._hooked: weakref.ref[nn.Parameter] | None = None
        if self._record is not None:
            self._listen()

    @property
    def parameter(self) -> nn.Parameter:
        return self.handle.parameter

    def to_dense(self, tensor: Tensor) -> Tensor:
        return super().to_dense(self.handle.all_gather(tensor))

    def from_dense(self, dense: Tensor) -> Tensor:
        return self.handle.shard(super().from_dense(dense))

    def to_live(self, tensor: Tensor) -> Tensor:
        return super().to_live(self.handle.all_gather(tensor))

    def from_live(self, live: Tensor) -> Tensor:
        found = super().from_live(live)
        return found if isinstance(found, DTensor) else self.handle.shard(found)

    def _place(self, values: Tensor, layout: Layout | None) -> None:
        set_layout(self.module, self._local, layout)
        self.handle.put(values, requires_grad=self._is_trained)
        self._ask_for_gradients()

    def _ask_for_gradients(self) -> None:
        """Switch gradients off if no weight is live: FSDP2 cannot send an empty gradient."""
        self.parameter.requires_grad_(self._is_trained and self.parameter.numel() > 0)

    def preview(self, mask: Tensor) -> Callable[[], None]:
        record, layout = self.handle.record, self._layout
        self.set_mask(mask)

        def undo() -> None:
            set_layout(self.module, self._local, layout)
            self.handle.put_back(record)

        return undo

    # Gradients

    @property
    def is_first_gradient(self) -> bool:
        return not self.handle.has_gradient

    @property
    def adds_up_gradients(self) -> bool:
        return False  # each backward pass is seen by itself

    def see(self, gradient: Tensor) -> None:
        """Record the mean gradient over the ranks, because each rank has seen different examples."""
        if self._record is not None:
            wide = gradient.detach() if gradient.dtype == torch.float64 else gradient.detach().float()
            self._record(self.handle.ranks.all_reduce_sum(wide).div_(self.handle.ranks.size))

    def _listen(self) -> None:
        if self._layout is not None:
            self._layout.recorder = weakref.ref(self)
        elif self.handle.gathered is not None:
            self._hook(self.handle.gathered)
        else:  # there will be one when the unit is gathered for the first time
            me = weakref.ref(self)

            def hook_now(*_: Any) -> None:
                handle.remove()
                if (own := me()) is not None and own._record is not None:
                    own._listen()

            handle = self.handle.unit.register_forward_pre_hook(hook_now)

    def _hook(self, gathered: nn.Parameter) -> None:
        """Record the gradient of each backward pass before it is accumulated."""
        if self._hooked is None or self._hooked() is not gathered:
            me = weakref.ref(self)
            gathered.register_hook(lambda gradient: hand_over(me(), gradient))  # type: ignore[no-untyped-call]
            self._hooked = weakref.ref(gathered)
