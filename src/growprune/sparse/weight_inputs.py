"""Observe the input of every weight while a model computes.

Torch passes each matrix product and convolution to a dispatch mode. The weight of a product is recognized by its
memory, whether the model uses it through a layer, `F.linear`, a copy under autocast, as one of several matrices in a
parameter (attention), or as one of stacked experts, each of which sees only its own tokens. Modules get no hooks, so
none are left behind if a forward pass fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from growprune.masks.layers import Weight
from growprune.sparse.flops import WeightMemory

CHUNK = 1 << 24
"""The number of input values to process at a time."""

KEPT_COPIES = 8
"""The number of copies of weights that are remembered. A copy is used soon after it is made, or never."""


@dataclass(frozen=True)
class Rows:
    """The input of a matrix product, one example a row."""

    tensor: Tensor

    @property
    def columns(self) -> int:
        """The number of columns of the weight, seen as a matrix (out, in)."""
        return self.tensor.shape[1]

    def chunks(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """The inputs as matrices (row groups of the weight, examples, columns), a few examples at a time."""
        for rows in self.tensor.split(max(1, CHUNK // max(1, self.columns))):  # type: ignore[no-untyped-call]
            yield rows.to(dtype).unsqueeze(0)


@dataclass(frozen=True)
class Patches:
    """The input of a convolution: an example is what one output position sees, kernel position by kernel position."""

    tensor: Tensor
    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    @property
    def columns(self) -> int:
        return self.tensor.shape[1] // self.groups * math.prod(self.kernel)

    def chunks(self, dtype: torch.dtype) -> Iterator[Tensor]:
        num_axes, each = len(self.kernel), self.tensor[:1].numel() * math.prod(self.kernel)
        for images in self.tensor.split(max(1, CHUNK // max(1, each))):  # type: ignore[no-untyped-call]
            patches = F.pad(images.to(dtype), [side for p in reversed(self.padding) for side in (p, p)])
            for axis, (k, s, d) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
                patches = patches.unfold(2 + axis, d * (k - 1) + 1, s)[..., ::d]
            # from (examples, channels, *output positions, *kernel positions)
            patches = patches.reshape(len(patches), self.groups, -1, *patches.shape[2:]).movedim(2, -1).movedim(1, 0)
            yield patches.reshape(self.groups, math.prod(patches.shape[1 : 2 + num_axes]), self.columns)


Source: TypeAlias = Rows | Patches

Factors: TypeAlias = Iterator[tuple[Tensor, Source]]
"""What may be a weight, and the input if it is one."""

Operands: TypeAlias = Iterator[tuple[Tensor, Callable[[], Factors]]]
"""Operands that may hold weights, each with a function that walks its weights and their inputs."""


def _product(a: Tensor, b: Tensor, *rest: Any, **options: Any) -> Operands:
    yield b, lambda: iter([(b, Rows(a))])
    yield a, lambda: iter([(a, Rows(b.mT))])


def _products(a: Tensor, b: Tensor, *rest: Any, **options: Any) -> Operands:
    """Several products of matrices at once: each weight its own, or one that is repeated."""
    yield b, lambda: ((b[i], Rows(a[i])) for i in range(len(a)))
    yield a, lambda: ((a[i], Rows(b[i].mT)) for i in range(len(a)))


def _vector_product(a: Tensor, x: Tensor, *rest: Any, **options: Any) -> Operands:
    yield a, lambda: iter([(a, Rows(x.unsqueeze(0)))])


def _added(read: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but the first argument is added to the product."""
    return lambda added, *args, **options: read(*args, **options)


def _linear(x: Tensor, weight: Tensor, *rest: Any, **options: Any) -> Operands:
    yield weight, lambda: iter([(weight, Rows(x.reshape(-1, x.shape[-1])))])


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, *rest: Any, **options: Any) -> Operands:
    """The experts of a mixture at once: rows that are sorted by expert, and where those of each end."""
    if a.dim() == 3 and b.dim() == 3:
        yield from _products(a, b)
    elif offs is not None and a.dim() == 2 and b.dim() == 3:
        yield b, lambda: ((b[i], Rows(a[s:e])) for i, (s, e) in enumerate(pairwise([0, *offs.tolist()])))


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Operands:
    if not transposed:  # a transposed convolution counts as not reached
        yield weight, lambda: iter([(weight, Patches(x, tuple(weight.shape[2:]), stride, padding, dilation, groups))])


PRODUCTS: dict[str, Callable[..., Operands]] = {
    "aten::mm": _product,
    "aten::addmm": _added(_product),
    "aten::_addmm_activation": _added(_product),
    "aten::bmm": _products,
    "aten::baddbmm": _added(_products),
    "aten::mv": _vector_product,
    "aten::addmv": _added(_vector_product),
    "aten::linear": _linear,
    "aten::_grouped_mm": _grouped,
    "transformers::grouped_mm_fallback": _grouped,
    "aten::convolution": _convolution,
}
"""How the operands of each operation are read, by its name."""


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Call `see` with each weight that takes part in a product, and with its input."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, weights: Sequence[Weight], see: Callable[[Weight, Source], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see
        self._weights: dict[str, list[Weight]] = {}
        for weight in weights:
            self._weights.setdefault(weight.parameter, []).append(weight)
        parameters = {name: parameter for name, parameter in model.named_parameters() if name in self._weights}
        self._memory = WeightMemory(parameters, kept=KEPT_COPIES)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name if hasattr(func, "_schema") else ""
        for operand, factors in PRODUCTS[name](*args, **kwargs) if name in PRODUCTS else ():
            for factor, source in factors() if operand in self._memory else ():
                for weight in self._weights_in(factor):
                    self._see(weight, source)
        out = func(*args, **kwargs)
        self._memory.note(name, tree_leaves((args, kwargs)), out)
        return out

    def _weights_in(self, factor: Tensor) -> list[Weight]:
        """The weights that lie in the memory of a tensor, at least in part."""
        name, first, end = self._memory.range_of(factor)
        return [weight for weight in self._weights[name] if _overlaps(weight, first, end)]


def _overlaps(weight: Weight, first: int, end: int) -> bool:
    if weight.rows is None:
        return True
    row = weight.numel // (weight.rows[1] - weight.rows[0])
    return weight.rows[0] * row < end and first < weight.rows[1] * row
