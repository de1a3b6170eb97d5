"""Sparse matrices straight from where weights are kept: the modules of a model in either storage."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from growprune.deployment.matrix import SparseMatrix, block_of, from_dense, from_live
from growprune.masks.layers import Weight
from growprune.masks.patterns import Pattern, Unstructured
from growprune.storage.compact_modules import layouts_of


def does_more(module: nn.Module) -> bool:
    """Whether calling a module does more than its class says: it has hooks, or a forward of its own."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in vars(module)


def matrix_of_module(
    module: nn.Module, mask: Tensor | None = None, *, name: str = "weight", weights: Sequence[Weight], pattern: Pattern
) -> SparseMatrix:
    """A parameter of a module, dense with a mask (without one, what is not zero lives) or compact.

    Args:
        weights: the prunable weights that are this parameter, as `SparseModel.weights` has them.
    """
    values = module._parameters[name]
    assert values is not None
    pattern, transposed = _pattern_of_all(pattern, weights), any(weight.transposed for weight in weights)
    layout = layouts_of(module).get(name)
    if layout is None:
        return from_dense(values, mask, pattern=pattern, transposed=transposed)
    kept = layout.is_folded
    return from_live(values, layout.mask(), pattern=pattern, transposed=transposed, inputs_last=kept)


def _pattern_of_all(pattern: Pattern, weights: Sequence[Weight]) -> Pattern:
    """The pattern of several matrices one below the other: blocks that end where a matrix does."""
    height, _ = block_of(pattern)
    is_cut = any(weight.rows is not None and weight.rows[0] % height for weight in weights)
    return Unstructured() if is_cut else pattern
