"""Run a model over a few batches and collect statistics of the inputs of its weights, block by block.

The first pass over all batches finds the order in which blocks compute, weights that no input reaches, and inputs that
are not finite, before anything is pruned. Then follows one pass for each block. It stops as soon as a later block is
reached, so on average it costs half a forward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from growprune.errors import GrowpruneError
from growprune.masks.layers import Weight
from growprune.masks.patterns import in_one_go, matrix_shape
from growprune.sparse.weight_inputs import Source, Watcher
from growprune.sparse.weight_memory import showing_products

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
        size += sum(leaf.nbytes for leaf in _tensors(batch))
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


class Inputs:
    """Statistics of the inputs of one weight, in float32 or wider.

    Args:
        with_products: sum the products of all pairs of inputs, (row groups, inputs, inputs), for SparseGPT; otherwise
            the squares, (row groups, inputs), for Wanda.
    """

    def __init__(self, *, with_products: bool) -> None:
        self._with_products = with_products
        self.total: Tensor | None = None
        """None if no input was seen."""

    def add(self, source: Source) -> None:
        for chunk in source.chunks(torch.float64 if source.tensor.dtype == torch.float64 else torch.float32):
            if not chunk.shape[1]:
                continue  # an expert without tokens
            if self.total is None:
                columns = (chunk.shape[2],) * (2 if self._with_products else 1)
                self.total = chunk.new_zeros(len(chunk), *columns)
            if self._with_products:
                self.total.baddbmm_(chunk.mT, chunk)
            else:
                self.total += chunk.square().sum(1)


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

    def inputs(self, block: str, *, with_products: bool) -> dict[str, Inputs]:
        """Return the input statistics of a block's weights, by weight name, for the weights that were reached."""
        found: dict[str, Inputs] = {}
        later = {*self._up_to} - self._up_to[block]

        def see(weight: Weight, source: Source) -> None:
            own = self._block_of[weight.name]
            if own == block and _fits(weight, source):
                found.setdefault(weight.name, Inputs(with_products=with_products)).add(source)
            elif own in later:
                raise _Reached

        for batch in self._batches:
            with contextlib.suppress(_Reached):
                self._run(batch, see)
        return {name: inputs for name, inputs in found.items() if inputs.total is not None}

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


def _tensors(batch: Any) -> list[Tensor]:
    # a mapping of another library, such as that of transformers' tokenizers, is a leaf to torch
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
