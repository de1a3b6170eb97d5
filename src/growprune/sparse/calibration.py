"""Run a model over a few batches and collect statistics of the inputs of its weights, block by block.

The first pass over all batches finds the order in which blocks compute, weights that no input reaches, and inputs that
are not finite, before anything is pruned. Then follows one pass for each block. It stops as soon as a later block is
reached, so on average it costs half a forward pass.

Torch passes each matrix product and convolution to a dispatch mode. The weight of a product is recognized by its
memory, whether the model uses it through a layer, `F.linear`, a copy under autocast, as one of several matrices in a
parameter (attention), or as one of stacked experts, each of which sees only its own tokens. Modules get no hooks, so
none are left behind if a forward pass fails.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from growprune.errors import GrowpruneError
from growprune.masks.layers import Weight
from growprune.masks.patterns import in_one_go, matrix_shape
from growprune.sparse.flops import WeightMemory, showing_products

CHUNK = 1 << 24
"""The number of input values to process at a time."""


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
"""What may be a weight, and its input if it is one."""


def _product(a: Tensor, b: Tensor, *rest: Any, **options: Any) -> Factors:
    yield b, Rows(a)
    yield a, Rows(b.mT)


def _products(a: Tensor, b: Tensor, *rest: Any, **options: Any) -> Factors:
    """Several products of matrices at once: each weight its own, or one that is repeated."""
    for one, other in zip(a, b, strict=True):
        yield from _product(one, other)


def _vector_product(a: Tensor, x: Tensor, *rest: Any, **options: Any) -> Factors:
    yield a, Rows(x.unsqueeze(0))


def _added(read: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but the first argument is added to the product."""
    return lambda added, *args, **options: read(*args, **options)


def _linear(x: Tensor, weight: Tensor, *rest: Any, **options: Any) -> Factors:
    yield weight, Rows(x.reshape(-1, x.shape[-1]))


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, *rest: Any, **options: Any) -> Factors:
    """The experts of a mixture at once: rows that are sorted by expert, and where those of each end."""
    if a.dim() == 3 and b.dim() == 3:
        yield from _products(a, b)
    elif offs is not None and a.dim() == 2 and b.dim() == 3:
        yield from ((b[i], Rows(a[s:e])) for i, (s, e) in enumerate(pairwise([0, *offs.tolist()])))


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
) -> Factors:
    if not transposed:  # a transposed convolution counts as not reached
        yield weight, Patches(x, tuple(weight.shape[2:]), stride, padding, dilation, groups)


PRODUCTS: dict[str, Callable[..., Factors]] = {
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
"""How the operands of each operation are read, by its name. One of them is a weight."""


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
        self._memory = WeightMemory(parameters, kept=8)  # a copy is used soon after it is made, or never

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        called = func._schema.name if hasattr(func, "_schema") else ""
        is_known = called in PRODUCTS and any(operand in self._memory for operand in args)
        for factor, source in PRODUCTS[called](*args, **kwargs) if is_known else ():
            name, first, end = self._memory.range_of(factor) if factor in self._memory else ("", 0, 0)
            for weight in self._weights.get(name, ()):
                row = weight.numel // (weight.rows[1] - weight.rows[0]) if weight.rows else 0
                # it lies in the memory of the factor, at least in part
                if weight.rows is None or (weight.rows[0] * row < end and first < weight.rows[1] * row):
                    self._see(weight, source)
        out = func(*args, **kwargs)
        self._memory.note(called, tree_leaves((args, kwargs)), out)
        return out


Forward = Callable[[nn.Module, Any], Any]
"""Computes a batch: forward(model, batch)."""

LIMIT = 4 << 30
"""The most bytes of batches that are kept."""


def read_batches(batches: Iterable[Any] | None) -> list[Any]:
    """Read all batches into a list, so that each block can see them again."""
    if batches is None or isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        what = "one batch" if isinstance(batches, Tensor | Mapping) else repr(batches)[:60]
        raise GrowpruneError(f"calibration must be an iterable of batches, such as [batch], got {what}")
    kept, size = [], 0
    for batch in batches:
        kept.append(batch)
        # a mapping of another library, such as that of transformers' tokenizers, is a leaf to torch
        leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
        size += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        if size > LIMIT:
            raise GrowpruneError(
                f"calibration has more than {LIMIT >> 30} GiB in {len(kept)} batches, which are kept in memory. A few "
                f"hundred examples are enough: pass itertools.islice(batches, 128)"
            )
    if not kept:
        is_iterator = iter(batches) is batches
        hint = ". A generator can be read only once: create it again, or pass a list" if is_iterator else ""
        raise GrowpruneError(f"calibration must have at least one batch, got none{hint}")
    return kept


def call(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch: a mapping of keyword arguments, a tuple or list of positional ones, or a tensor."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


class _Reached(BaseException):
    """Ends a forward pass; not an Exception, which a model might catch."""


class Calibration:
    """The batches, and the passes over them.

    Args:
        weights: those whose inputs are wanted.
        block_of: the name of the block of each weight, by the weight's name.
        forward: computes a batch; by default `call`.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Sequence[Weight],
        batches: Sequence[Any],
        *,
        block_of: Mapping[str, str],
        forward: Forward | None = None,
    ) -> None:
        self._model, self._weights, self._batches, self._block_of = model, weights, batches, block_of
        self._forward = forward or call
        self._up_to: dict[str, set[str]] = {}
        """By block: those that computed before its last product, in some batch."""

    def look(self) -> tuple[list[str], list[Weight]]:
        """Find the blocks in the order in which they compute, and the weights that no input reached.

        Raise if an input is not finite.
        """
        order: dict[str, None] = {}
        reached: set[str] = set()
        for number, batch in enumerate(self._batches):
            seen: dict[str, Tensor] = {}
            walk: list[str] = []

            def see(weight: Weight, source: Source, seen: dict[str, Tensor] = seen, walk: list[str] = walk) -> None:
                if _fits(weight, source) and source.tensor.numel():
                    walk.append(self._block_of[weight.name])
                    finite = torch.isfinite(source.tensor).all()
                    seen[weight.name] = seen[weight.name] & finite if weight.name in seen else finite

            self._run(batch, see, number=number)
            for name, is_finite in zip(seen, in_one_go(list(seen.values())), strict=True):
                if not is_finite:
                    raise GrowpruneError(
                        f"the input of {name} has NaN or infinity in batch {number} of the calibration: remove that "
                        f"batch, or compute in float32 or bfloat16"
                    )
            reached |= seen.keys()
            order |= dict.fromkeys(walk)
            last = {block: place for place, block in enumerate(walk)}
            first = {block: place for place, block in reversed(list(enumerate(walk)))}
            for block, place in last.items():
                self._up_to.setdefault(block, set()).update(other for other in first if first[other] <= place)
        return list(order), [weight for weight in self._weights if weight.name not in reached]

    def inputs(self, block: str, *, with_products: bool) -> dict[str, Tensor]:
        """Return sums over the inputs of a block's weights in float32 or wider, by name, for the weights reached.

        Args:
            with_products: sum the products of all pairs of inputs, (row groups, inputs, inputs), for SparseGPT;
                otherwise the squares, (row groups, inputs), for Wanda.
        """
        totals: dict[str, Tensor] = {}
        later = {*self._up_to} - self._up_to[block]

        def see(weight: Weight, source: Source) -> None:
            own = self._block_of[weight.name]
            if own != block or not _fits(weight, source):
                if own in later:
                    raise _Reached
                return
            for chunk in source.chunks(torch.float64 if source.tensor.dtype == torch.float64 else torch.float32):
                if not chunk.shape[1]:
                    continue  # an expert without tokens
                if weight.name not in totals:
                    columns = (chunk.shape[2],) * (2 if with_products else 1)
                    totals[weight.name] = chunk.new_zeros(len(chunk), *columns)
                if with_products:
                    totals[weight.name].baddbmm_(chunk.mT, chunk)
                else:
                    totals[weight.name] += chunk.square().sum(1)

        for batch in self._batches:
            with contextlib.suppress(_Reached):
                self._run(batch, see)
        return totals

    def _run(self, batch: Any, see: Callable[[Weight, Source], None], *, number: int = 0) -> None:
        device = next(self._model.parameters()).device
        plain = dict(batch) if isinstance(batch, Mapping) else batch  # a model may take things out of a dict
        batch = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, plain)
        try:
            with Watcher(self._model, self._weights, see):
                self._forward(self._model, batch)
        except TypeError as error:
            what = type(batch).__name__ + (f" of {', '.join(map(str, batch))}" if isinstance(batch, dict) else "")
            raise GrowpruneError(
                f"the model cannot compute batch {number} of the calibration, a {what} ({error}): pass "
                f"forward=lambda model, batch: ..."
            ) from error


@contextlib.contextmanager
def looking_only(model: nn.Module) -> Iterator[None]:
    """Switch to eval mode without gradients, in full precision; restore the mode and all random numbers at the end."""
    precision, caches = torch.get_float32_matmul_precision(), torch.is_autocast_cache_enabled()
    try:
        torch.set_float32_matmul_precision("highest")
        torch.set_autocast_cache_enabled(False)  # copies of weights as they were before they were pruned
        torch.clear_autocast_cache()
        with showing_products(model):
            yield
    finally:
        torch.set_autocast_cache_enabled(caches)
        torch.set_float32_matmul_precision(precision)


def _fits(weight: Weight, source: Source) -> bool:
    """True if an input has as many columns as the weight. A product with only some of them is not informative."""
    return source.columns == matrix_shape(weight)[1]
