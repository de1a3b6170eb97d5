"""Masked storage: the dense parameter stays where it is, beside a bool mask. Costs one byte a weight.

The model is not rewritten: its forward pass, its `state_dict`, deepcopy and torch.compile see a plain parameter that
happens to hold zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class Masked:
    """A parameter held dense, with the mask of its live weights."""

    def __init__(self, model: nn.Module, name: str) -> None:
        path, _, self._local = name.rpartition(".")
        self._module = model.get_submodule(path)
        self._mask = torch.ones_like(self.parameter, dtype=torch.bool)
        self._hooked: nn.Parameter | None = None
        self._handle: RemovableHandle | None = None

    @property
    def parameter(self) -> nn.Parameter:
        parameter = getattr(self._module, self._local)
        assert isinstance(parameter, nn.Parameter)
        return parameter

    @property
    def shape(self) -> torch.Size:
        return self._mask.shape

    def mask(self) -> Tensor:
        device = self.parameter.device
        if self._mask.device != device:  # the model was moved
            self._mask = self._mask.to(device)
        return self._mask

    def weight(self) -> Tensor:
        return self.parameter.detach()

    def keep(self, mask: Tensor) -> None:
        self.mask().copy_(mask)  # in place, so that nothing compiled around it is compiled again
        self.enforce()

    def load(self, live: Tensor, mask: Tensor) -> None:
        self.mask().copy_(mask)
        with torch.no_grad():
            self.parameter.copy_(self.from_live(live))

    def to_live(self, tensor: Tensor) -> Tensor:
        return tensor[self.mask()]

    def from_live(self, live: Tensor) -> Tensor:
        mask = self.mask()
        dense = torch.zeros(mask.shape, dtype=live.dtype, device=mask.device)
        dense[mask] = live.to(mask.device)
        return dense

    @torch.no_grad()
    def enforce(self, *shaped_alike: Tensor) -> None:
        mask = self.mask()
        for tensor in (self.parameter, *shaped_alike):
            # not a product: NaN * 0 is NaN, and -1 * 0 is a negative zero
            torch.where(mask, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device), out=tensor)

    def hook_gradients(self) -> None:
        parameter = self.parameter
        if self._hooked is parameter or not parameter.requires_grad:
            return
        if self._handle is not None:
            self._handle.remove()
        # before accumulation, so that clipping, accumulation and all-reduce see masked gradients only
        self._handle = parameter.register_hook(self._masked_gradient)  # type: ignore[no-untyped-call]
        self._hooked = parameter

    def _masked_gradient(self, gradient: Tensor) -> Tensor:
        return torch.where(self.mask(), gradient, 0)
