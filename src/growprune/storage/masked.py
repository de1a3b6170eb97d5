"""Masked storage: the dense parameter stays where it is, beside its mask.

The model is not rewritten: its forward pass, its `state_dict`, deepcopy and torch.compile see a plain parameter that
happens to hold zeros. The mask takes a bit a weight on a GPU with Triton. Elsewhere it is as large as the weight: an
integer of the same size, all ones or all zeros, so that masking is one `bitwise_and_`, the fastest torch has on a CPU.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.masks.bits import unpack
from growprune.masks.patterns import CPU_CHUNK, Pattern, in_one_go
from growprune.storage import kernels
from growprune.storage.parameter import SparseParameter, no_parameter, uncompiled

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element: the integer type of that size."""

MASKED = "_growprune_masked"
"""The attribute of a gradient that has been masked, so that what is added to it is known to come later."""


class Masked(SparseParameter):
    """A parameter stored dense, with the mask of its live weights."""

    adds_up_gradients = True

    def __init__(self, model: nn.Module, name: str, pattern: Pattern) -> None:
        super().__init__(model, name, pattern)
        self._row_major = tuple(range(len(self.shape)))
        self._num_masks = 0
        self._hooked: weakref.ref[nn.Parameter] | None = None
        self._handle: Any = None
        self.record: Callable[[Tensor], None] | None = None
        self._device: torch.device | None = None
        self._takes_bits = False
        self._is_full: Tensor | bool = True
        self._bits: dict[tuple[int, ...], Tensor] = {}
        self._mask = torch.empty(0)
        self._hold(torch.ones(self.shape, dtype=torch.bool, device=self.parameter.device), is_full=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "record": None, "_hooked": None, "_handle": None}  # a copy records nothing

    def __deepcopy__(self, memo: dict[int, Any]) -> Masked:
        """Return a copy that masks the gradients of the copied parameter from the start, with any optimizer."""
        memo[id(self)] = clone = object.__new__(type(self))
        vars(clone).update(copy.deepcopy(self.__getstate__(), memo))
        parameter = self.module._parameters.get(self._local)
        if parameter is not None and parameter.shape == self.shape:
            copied = copy.deepcopy(parameter, memo)  # not by its module, which may not have it yet
            if copied is not parameter:
                clone.hook_gradients(copied)
        return clone

    @staticmethod
    def check(model: nn.Module, names: Collection[str]) -> None:
        for name in names:
            if model.get_parameter(name).is_complex():
                raise GrowpruneError(f"{name} is complex, which cannot be pruned: add it to keep_dense")

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self.module._parameters.get(self._local)
        if parameter is None:
            raise no_parameter(self.module, self._local)
        return parameter

    @property
    def is_known_full(self) -> bool:
        return self._is_full is True

    def num_alive(self) -> int:
        return self.shape.numel() if self.is_known_full else int(torch.count_nonzero(self.mask()))

    def mask(self) -> Tensor:
        self._follow()
        return self._as_bools()

    def _as_bools(self) -> Tensor:
        if not self._bits:
            return self._mask.bool()
        return kernels.unpack(self._bits[self._row_major], self.shape.numel()).view(self.shape)

    def _follow(self) -> None:
        """Move the mask to the device of the parameter, if the model was moved."""
        device = self.parameter.device
        if self._device != device:
            mask = self._as_bools().to(device)
            self._bits = {}
            self._hold(mask)

    def _hold(self, mask: Tensor, *, is_full: Tensor | bool | None = None) -> None:
        """Store a mask, in place if there was one, so that compiled or captured code stays valid."""
        self._num_masks += 1
        if mask.device != self._device:
            self._device, self._takes_bits = mask.device, kernels.can_zero_off(mask.device)
        if is_full is None:  # on a GPU it is asked when it matters: an answer waits for the device
            is_full = bool(mask.all()) if mask.device.type == "cpu" else mask.all()
        self._is_full = is_full
        if self._takes_bits:
            for order in self._bits or [self._row_major]:
                bits = kernels.pack(mask.permute(order).reshape(-1))
                self._bits[order] = self._bits[order].copy_(bits) if order in self._bits else bits
            self._mask = self._mask.new_empty(0)
        else:
            if self._mask.shape != mask.shape or self._mask.device != mask.device:
                self._mask = torch.empty_like(mask, dtype=INTEGERS[self.parameter.element_size()])
            self._mask.copy_(mask).neg_()  # -1 has all bits set

    def weight(self) -> Tensor:
        return self.parameter.detach()

    def set_mask(self, mask: Tensor) -> None:
        self._follow()
        self._hold(mask)
        self._zero_off(self.parameter)

    def preview(self, mask: Tensor) -> Callable[[], None]:
        before = self.mask()
        gone = before & ~mask
        values = self.weight()[gone]
        self.set_mask(mask)

        def undo() -> None:
            self.set_mask(before)
            with torch.no_grad():
                self.parameter[gone] = values

        return undo

    def load(self, live: Tensor, packed: Tensor, *, keep: bool = False) -> None:
        del keep  # a dense weight is another thing
        self._follow()
        is_full, weight = live.numel() == self.shape.numel(), self.weight()
        can_fill = all(tensor.device.type == "cpu" for tensor in (weight, live, packed)) and weight.dtype == live.dtype
        if can_fill and weight.is_contiguous() and not is_full:
            mask = torch.empty(self.shape, dtype=torch.bool)
            kernels.scatter_live(weight.view(-1), mask.view(-1), live, packed)
            torch.autograd.graph.increment_version(weight)
            self._hold(mask, is_full=False)
        else:
            self._hold(unpack(packed, self.shape, self._device), is_full=is_full)
            weight.copy_(live.view(self.shape) if is_full else self.from_live(live))

    @staticmethod
    def enforce(shaped_alike: Sequence[tuple[Any, Sequence[Tensor]]]) -> None:
        # which masks are full is asked at once, because each single answer would wait for the device
        asked = [one for one, _ in shaped_alike if isinstance(one._is_full, Tensor)]
        for one, is_full in zip(asked, in_one_go([one._is_full for one in asked]) if asked else (), strict=True):
            one._is_full = bool(is_full)
        for sparse_parameter, tensors in shaped_alike:
            for tensor in tensors:
                sparse_parameter.zero_off(tensor)

    def zero_off(self, tensor: Tensor) -> None:
        """Set a tensor with the shape of the weight to exactly zero where the mask is False, in place."""
        if tensor.device != self._device:
            self._follow()
        # a graph that is being captured may be run again when the mask is another
        if not (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
            if isinstance(self._is_full, Tensor):
                self._is_full = bool(self._is_full)
            if self._is_full:
                return
        self._zero_off(tensor)

    def _zero_off(self, tensor: Tensor) -> None:
        if type(tensor) not in (Tensor, nn.Parameter) and is_wrapped(tensor):
            values, mask = plain(tensor), self.mask()
            if bool(values.masked_fill(mask, 0).any()):  # only then, because quantizing again may round again
                with torch.no_grad():
                    tensor.copy_(torch.where(mask, values, 0))
        elif self._bits and (flat := self._flat(tensor)) is not None:
            kernels.zero_off(*flat)
            torch.autograd.graph.increment_version(tensor)
        else:
            zero_off(self.mask() if self._bits else self._mask, tensor)

    def _flat(self, tensor: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return a tensor in memory order, with the bits in that order; None if it is not contiguous in memory."""
        order = self._row_major
        if not tensor.is_contiguous():
            strides = tensor.stride()
            order = tuple(sorted(order, key=lambda i: -strides[i]))
            tensor = tensor.detach().permute(order)
            if not tensor.is_contiguous():
                return None
        if order not in self._bits:
            self._bits[order] = kernels.pack(self.mask().permute(order).reshape(-1))
        return tensor, self._bits[order]

    @property
    def is_first_gradient(self) -> bool:
        return getattr(self.parameter.grad, MASKED, None) is None  # what has been added to was masked before

    def mask_gradient(self, *, again: bool = False) -> None:
        """Mask the present gradient, unless nobody has written to it since it was masked.

        A write through `.data` goes unseen; then the stepper masks the weight after the step all the same.
        """
        gradient = self.parameter.grad
        if gradient is not None and (again or getattr(gradient, MASKED, None) != (gradient._version, self._num_masks)):
            self.zero_off(gradient)
            setattr(gradient, MASKED, (gradient._version, self._num_masks))

    def hook_gradients(self, parameter: nn.Parameter | None = None) -> None:
        """Mask gradients as soon as they are there, so that clipping, accumulation and all-reduce see them masked."""
        parameter = self.parameter if parameter is None else parameter
        can_have_gradients = parameter.is_floating_point() and not parameter.is_inference()
        if (self._hooked is None or self._hooked() is not parameter) and can_have_gradients:
            me = weakref.ref(self)

            def arrived(parameter: Tensor) -> None:
                sparse_parameter, gradient = me(), parameter.grad
                if sparse_parameter is not None and gradient is not None:
                    if sparse_parameter.record is not None:
                        sparse_parameter.record(gradient)
                    sparse_parameter.mask_gradient(again=True)

            with hookable(parameter):
                self._handle = parameter.register_post_accumulate_grad_hook(uncompiled(arrived))  # type: ignore[no-untyped-call]
            self._hooked = weakref.ref(parameter)

    def release(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._hooked, self._handle = None, None


@contextmanager
def hookable(parameter: nn.Parameter) -> Iterator[None]:
    """Allow a hook on a frozen parameter, which then works once the parameter is unfrozen."""
    is_frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    yield
    if is_frozen:
        parameter.requires_grad_(False)


@torch.no_grad()
def zero_off(mask: Tensor, tensor: Tensor) -> None:
    """Set a tensor to exactly zero where a mask is False, or an integer mask is 0 instead of -1; in place.

    This works on bits: a product of floats would leave NaN and negative zeros, and torch.where is slow on a CPU.
    A mask of another type is widened a few rows at a time.
    """
    bits = tensor.detach().view(INTEGERS[tensor.element_size()])
    if mask.dtype == bits.dtype:
        bits.bitwise_and_(mask)
        return
    rows = max(1, CPU_CHUNK * len(bits) // max(1, bits.numel()))
    pairs = zip(bits.split(rows), mask.split(rows), strict=True)  # type: ignore[no-untyped-call]
    for some_bits, some_mask in pairs:
        wide = some_mask.to(bits.dtype)
        some_bits.bitwise_and_(wide.neg_() if mask.dtype == torch.bool else wide)


# Tensor subclasses with few operations, such as quantized optimizer state (torchao's 8-bit optimizers). An optimizer
# reads and writes its state by copying, so such a tensor can always be copied to a plain one and back.


def is_wrapped(tensor: Tensor) -> bool:
    """True for a tensor subclass that overrides operations, except shards (DTensor), which support them all."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not hasattr(tensor, "device_mesh")


def plain(tensor: Tensor) -> Tensor:
    """Return the values of a tensor as a plain tensor. A plain tensor is returned unchanged."""
    if not is_wrapped(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
