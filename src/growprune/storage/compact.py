"""Compact storage: keep only the live values of a sparse weight, and one bit for each weight or block.

The parameter of the layer *becomes* the 1-D tensor of its live values, under its old name. So gradients, optimizer
state, moving averages, all-reduce and checkpoints shrink too. The dense weight exists only while its layer computes, in
the dtype of the computation. `Linear` and convolutions create it for the forward pass, free it, and create it again for
the backward pass, where the dense gradient of one layer at a time is reduced to the live values. Any other module gets
the dense weight, with gradients, when it reads its attribute; there autograd keeps it until the backward pass. A fully
live weight is a plain dense parameter; its layer frees and recreates the copy that autocast would keep.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.masks.bits import unpack
from growprune.masks.patterns import Pattern
from growprune.storage import block_products, kernels
from growprune.storage.blocks import block_of, live_blocks
from growprune.storage.compact_layers import LAYOUTS, hand_over, watch
from growprune.storage.compact_modules import let_compile_again, make_plain, set_layout
from growprune.storage.layout import Layout
from growprune.storage.masked import hookable
from growprune.storage.parameter import SparseParameter, no_parameter, uncompiled


class Compact(SparseParameter):
    """A parameter stored as its live values."""

    def __init__(self, model: nn.Module, name: str, pattern: Pattern) -> None:
        super().__init__(model, name, pattern)
        self._strides = self.parameter.stride()
        """The strides of the dense weight: torch rounds otherwise with others, such as those of channels_last."""
        self._group = pattern.run_length(self.shape, transposed=getattr(self.module, "transposed", False))
        """The number of consecutive elements that share a bit."""
        self._block = block_of(pattern, name, self.shape)
        block_products.check_environment()
        self._record: Callable[[Tensor], None] | None = None
        self._listening: weakref.ref[nn.Parameter] | None = None
        set_layout(self.module, self._local, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_record": None, "_listening": None}  # a copy records nothing

    @staticmethod
    def check(model: nn.Module, name: str) -> None:
        parameter = model.get_parameter(name)
        path = name.rpartition(".")[0]
        if isinstance(layer := model.get_submodule(path), nn.RNNBase):
            what, instead = path or "the model", f", or keep_dense=[{path!r}]" if path else ""
            raise GrowpruneError(
                f"storage='compact' does not support {what} ({type(layer).__name__}): use storage='masked'{instead}"
            )
        if not parameter.is_floating_point():
            raise GrowpruneError(
                f"storage='compact' does not support {name}, which has dtype {parameter.dtype}: add it to keep_dense"
            )
        everywhere = [p for _, m in model.named_modules(remove_duplicate=False) for p in m._parameters.values()]
        if sum(p is parameter for p in everywhere) > 1:
            places = [n for n, p in model.named_parameters(remove_duplicate=False) if p is parameter]
            raise GrowpruneError(
                f"storage='compact' does not support {name}, which is tied to {', '.join(places[1:])}: "
                f"use storage='masked', or add it to keep_dense"
            )

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self.module._parameters.get(self._local)
        if parameter is None:
            raise no_parameter(self.module, self._local)
        return parameter

    @property
    def _layout(self) -> Layout | None:
        """The layout; None while all weights are live. It belongs to the module, so that copies include it."""
        layout: Layout | None = vars(self.module)[LAYOUTS][self._local]
        return layout

    @property
    def is_known_full(self) -> bool:
        return self._layout is None

    def num_alive(self) -> int:
        return self.shape.numel() if self._layout is None else self._layout.num_alive

    def mask(self) -> Tensor:
        if self._layout is None:
            return torch.ones(self.shape, dtype=torch.bool, device=self.parameter.device)
        return self._layout.to(self.parameter.device).mask()

    def weight(self) -> Tensor:
        return self.to_dense(self.parameter.detach())

    def set_mask(self, mask: Tensor) -> None:
        self._put(self.weight(), mask)

    def load(self, live: Tensor, packed: Tensor, *, keep: bool = False) -> None:
        here = live.device if self.parameter.is_meta else self.parameter.device
        live = live.to(here, self.parameter.dtype)
        kept = (lambda tensor: tensor) if keep else kernels.padded_copy  # a copy is no view of somebody's file
        if live.numel() == self.shape.numel():
            self._keep(kept(live.view(-1)).view(self.shape), None)
        elif (layout := Layout.of_packed(packed.to(here), self.shape, self._group, keep=keep)) is not None:
            self._keep(kept(live), layout)
        else:
            mask = unpack(packed, self.shape, here)
            dense = torch.zeros(self.shape, dtype=live.dtype, device=here)
            dense[mask] = live
            self._put(dense, mask)

    def preview(self, mask: Tensor) -> Callable[[], None]:
        parameter, layout = self.parameter, self._layout
        self.set_mask(mask)

        def undo() -> None:
            self.module._parameters[self._local] = parameter
            set_layout(self.module, self._local, layout)

        return undo

    def to_dense(self, tensor: Tensor) -> Tensor:
        return tensor if self._layout is None else self._layout.expand(tensor)

    def from_dense(self, dense: Tensor) -> Tensor:
        return dense if self._layout is None else self._layout.compress(dense)

    def to_live(self, tensor: Tensor) -> Tensor:
        if self._layout is not None and not self._layout.is_folded:
            return tensor
        return super().to_live(tensor)

    def from_live(self, live: Tensor) -> Tensor:
        if self._layout is not None and not self._layout.is_folded:
            return live.to(self.parameter.device)
        return super().from_live(live)

    def release(self) -> None:
        make_plain(self.module)

    @property
    def is_first_gradient(self) -> bool:
        return self._layout is None or self.parameter.grad is None  # of a plain one, each is the sum

    @property
    def adds_up_gradients(self) -> bool:
        return self._layout is None  # then the parameter is a plain one, and what is recorded is its gradient

    @property
    def record(self) -> Callable[[Tensor], None] | None:
        return self._record

    @record.setter
    def record(self, record: Callable[[Tensor], None] | None) -> None:
        self._record = record
        watch(self.module, is_watched=record is not None)
        if record is not None:
            self._listen()

    def see(self, gradient: Tensor) -> None:
        """Record a dense gradient."""
        if self._record is not None:
            self._record(gradient)

    def _listen(self) -> None:
        """Start to record dense gradients: in the layer, or at the parameter itself if it is fully live."""
        parameter, me = self.parameter, weakref.ref(self)
        if self._layout is not None:
            self._layout.recorder = me
        elif self._listening is None or self._listening() is not parameter:
            with hookable(parameter):
                parameter.register_post_accumulate_grad_hook(uncompiled(lambda p: hand_over(me(), p.grad)))  # type: ignore[no-untyped-call]
            self._listening = weakref.ref(parameter)

    def _put(self, dense: Tensor, mask: Tensor) -> None:
        group = self._group if self._group > 1 and _is_grouped(mask, self._group) else 1
        layout = None if bool(mask.all()) else Layout.of(mask, group)
        self._keep(torch.where(mask, dense, 0) if layout is None else layout.compress(dense), layout)

    def _keep(self, values: Tensor, layout: Layout | None) -> None:
        if layout is None and values.stride() != self._strides:
            strided = torch.empty_strided(self.shape, self._strides, dtype=values.dtype, device=values.device)
            values = strided.copy_(values)
        if layout is not None and self._block is not None:
            layout.blocks = live_blocks(layout.mask(), *self._block)
        self._place(values, layout)
        let_compile_again()
        if self._record is not None:
            self._listen()

    def _place(self, values: Tensor, layout: Layout | None) -> None:
        self.module._parameters[self._local] = nn.Parameter(values, requires_grad=self.parameter.requires_grad)
        set_layout(self.module, self._local, layout)


def _is_grouped(mask: Tensor, group: int) -> bool:
    folded = mask.movedim(1, -1).reshape(-1, group)
    return torch.equal(folded.any(1), folded.all(1))
