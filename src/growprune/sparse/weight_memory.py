"""Recognize the weights of a model by their memory while it computes.

A dispatch mode sees every operation, but its arguments have no names: they are views or copies of parameters.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from growprune.sparse.rng import rng_state, set_rng_state

COPIES = ("aten::_to_copy", "aten::clone", "growprune::expand")
"""Operations that copy a weight into another tensor. The last is how compact storage makes it dense."""


class WeightMemory:
    """Find the parameter that a tensor is a view or copy of.

    Args:
        parameters: the parameters to recognize, by name; several may share a storage.
        kept: how many copies of parameters are remembered, and so kept in memory; by default all.
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, kept: int | None = None) -> None:
        self._kept = kept
        self._places: dict[int, list[tuple[range, str, int]]] = {}
        """By memory: the range of a parameter in it, its name, and the index of its first element there."""
        self._copies: deque[Tensor] = deque()
        """Kept, so that their memory is not given to anything else."""
        for name, parameter in parameters.items():
            self._place(parameter, name, 0)

    def __contains__(self, tensor: Any) -> bool:
        return self._found(tensor) is not None

    def range_of(self, tensor: Tensor) -> tuple[str, int, int]:
        """Return the parameter that a tensor is part of, and the range of its elements."""
        found = self._found(tensor)
        assert found is not None, "ask whether it is one first"
        return found[0], found[1], found[1] + _extent(tensor)

    def note(self, operation: str, arguments: Sequence[Any], out: Any) -> None:
        """Remember the result of an operation if it is a copy of a parameter."""
        for copied in [a for a in reversed(arguments) if a in self][:1] if operation in COPIES else ():
            name, first, _ = self.range_of(copied)
            self._place(out, name, first)
            self._copies.append(out)
            if self._kept is not None and len(self._copies) > self._kept:
                del self._places[_memory(self._copies.popleft())]

    def _place(self, tensor: Tensor, name: str, first: int) -> None:
        start = int(tensor.storage_offset())
        self._places.setdefault(_memory(tensor), []).append((range(start, start + _extent(tensor)), name, first))

    def _found(self, tensor: Any) -> tuple[str, int] | None:
        """Return the parameter in which a tensor begins, and the index of the first element."""
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return None
        places, at = self._places.get(_memory(tensor), ()), int(tensor.storage_offset())
        return next(((name, first + at - lies.start) for lies, name, first in places if at in lies), None)


def _extent(tensor: Tensor) -> int:
    """From the first to the last element in memory; fewer than `numel` if a weight is repeated along a batch."""
    return 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # unlike data_ptr, it tells tensors on the meta device apart


@contextlib.contextmanager
def showing_products(model: nn.Module) -> Iterator[None]:
    """Switch to eval mode without gradients, and to operations that show each product; restore all of it at the end."""
    training, random = {module: module.training for module in model.modules()}, rng_state()
    fast_attention = torch.backends.mha.get_fastpath_enabled()
    # cuDNN and oneDNN compute all steps of a recurrent layer in one operation
    is_recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    libraries: list[Any] = [torch.backends.cudnn, torch.backends.mkldnn] if is_recurrent else []
    before = [library.enabled for library in libraries]
    try:
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)  # one operation for a whole layer
        for library in libraries:
            library.enabled = False
        with torch.no_grad():
            yield
    finally:
        for library, was_enabled in zip(libraries, before, strict=True):
            library.enabled = was_enabled
        torch.backends.mha.set_fastpath_enabled(fast_attention)
        for module, was_training in training.items():
            module.training = was_training
        set_rng_state(random)
