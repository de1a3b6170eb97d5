"""Masked storage: the dense parameter stays where it is, beside a bool mask. Costs one byte a weight.

The model is not rewritten: its forward pass, its `state_dict`, deepcopy and torch.compile see a plain parameter that
happens to hold zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from growprune.errors import GrowpruneError
from growprune.patterns import Pattern
from growprune.selection import chunk_elements

SMALL = 1 << 22
"""Up to how many weights a mask on a GPU is also kept as integers, four bytes a weight, to mask many at once."""

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element: the integer type of that size."""


class Masked:
    """A parameter held dense, with the mask of its live weights."""

    adds_up_gradients = True

    def __init__(self, model: nn.Module, name: str, pattern: Pattern) -> None:
        del pattern
        path, _, self._local = name.rpartition(".")
        self.module = model.get_submodule(path)
        self._mask = torch.ones_like(self.parameter, dtype=torch.bool)
        self._wide: Tensor | None = None
        self._hooked: weakref.ref[nn.Parameter] | None = None
        self.record: Callable[[Tensor], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "record": None}  # a copy records nothing

    @staticmethod
    def check(model: nn.Module, name: str) -> None:
        if model.get_parameter(name).is_complex():
            raise GrowpruneError(f"{name} is complex, which cannot be pruned: add it to keep_dense")

    @property
    def parameter(self) -> nn.Parameter:
        parameter = getattr(self.module, self._local)
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

    def set_mask(self, mask: Tensor) -> None:
        self._set_mask(mask)
        zero_off(self.mask(), self.parameter)

    def _set_mask(self, mask: Tensor) -> None:
        self.mask().copy_(mask)  # in place, so that nothing compiled around it is compiled again
        self._wide = None

    def preview(self, mask: Tensor) -> Callable[[], None]:
        before = self.mask().clone()
        gone = before & ~mask
        values = self.weight()[gone]
        self.set_mask(mask)

        def undo() -> None:
            self._set_mask(before)
            with torch.no_grad():
                self.parameter[gone] = values

        return undo

    def load(self, live: Tensor, mask: Tensor) -> None:
        self._set_mask(mask)
        with torch.no_grad():
            self.parameter.copy_(self.from_live(live))

    def to_dense(self, tensor: Tensor) -> Tensor:
        return tensor

    def from_dense(self, dense: Tensor) -> Tensor:
        return dense

    def to_live(self, tensor: Tensor) -> Tensor:
        return tensor[self.mask()]

    def from_live(self, live: Tensor) -> Tensor:
        mask = self.mask()
        dense = torch.zeros(mask.shape, dtype=live.dtype, device=mask.device)
        dense[mask] = live.to(mask.device)
        return dense

    @staticmethod
    def enforce(shaped_alike: Sequence[tuple[Any, Sequence[Tensor]]]) -> None:
        """Starting to mask a small tensor takes a GPU longer than masking it, so all small ones go at once."""
        small: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for sparse_parameter, tensors in shaped_alike:
            mask = sparse_parameter.mask()
            for tensor in tensors:
                if tensor.is_cuda and tensor.numel() <= SMALL and tensor.element_size() > 1:
                    bits = _bits(tensor)
                    small.setdefault(bits.dtype, []).append((bits, sparse_parameter._wide_mask(bits.dtype)))
                else:
                    zero_off(mask, tensor)
        for pairs in small.values():
            torch._foreach_mul_([bits for bits, _ in pairs], [mask for _, mask in pairs])

    def _wide_mask(self, dtype: torch.dtype) -> Tensor:
        """The mask as integers, kept until it changes."""
        if self._wide is None or self._wide.dtype != dtype or self._wide.device != self._mask.device:
            self._wide = self.mask().to(dtype)
        return self._wide

    def hook_gradients(self) -> None:
        parameter = self.parameter
        is_hooked = self._hooked is not None and self._hooked() is parameter
        if not is_hooked and _has_gradients(parameter):
            # as soon as they are there, so that clipping, accumulation and all-reduce see masked gradients only
            with hookable(parameter):
                parameter.register_post_accumulate_grad_hook(_mask_gradient)  # type: ignore[no-untyped-call]
            self._hooked = weakref.ref(parameter)
            HOLDERS[parameter] = [*_holders(parameter), weakref.ref(self)]


def _has_gradients(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and not parameter.is_inference()


@contextmanager
def hookable(parameter: nn.Parameter) -> Iterator[None]:
    """Let a hook be registered on a frozen parameter, which it sees to from the day the parameter is unfrozen."""
    is_frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    yield
    if is_frozen:
        parameter.requires_grad_(False)


HOLDERS: Any = WeakTensorKeyDictionary()
"""By parameter, who masks its gradients: of several SparseModels of one model, the last that is still there."""


def _holders(parameter: Tensor) -> list[weakref.ref[Masked]]:
    return [reference for reference in HOLDERS.get(parameter, ()) if reference() is not None]


def _mask_gradient(parameter: Tensor) -> None:
    """Mask a gradient for as long as somebody holds the mask: a model may outlive it, and must then train freely."""
    holders = _holders(parameter)
    sparse_parameter = holders[-1]() if holders else None
    if sparse_parameter is not None and parameter.grad is not None:
        if sparse_parameter.record is not None:
            sparse_parameter.record(parameter.grad)
        zero_off(sparse_parameter.mask(), parameter.grad)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(INTEGERS[tensor.element_size()])


@torch.no_grad()
def zero_off(mask: Tensor, tensor: Tensor) -> None:
    """Make a tensor exactly zero off a mask, in place.

    The product is one of bits: one of floats would leave NaN and negative zeros, and torch.where is slow on a CPU.
    There it goes a few rows at a time, since the mask is widened first; a GPU widens as it reads.
    """
    bits = _bits(tensor)
    if tensor.is_cuda:
        bits.mul_(mask)
        return
    rows = max(1, chunk_elements(tensor.device) * len(bits) // max(1, bits.numel()))
    pairs = zip(bits.split(rows), mask.split(rows), strict=True)  # type: ignore[no-untyped-call]
    for some_bits, some_mask in pairs:
        some_bits.mul_(some_mask)
