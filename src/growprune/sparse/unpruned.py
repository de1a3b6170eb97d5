"""What of a model stays dense although it need not: said once, where a model is made sparse. Standard library only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from growprune.masks.layers import Weight, adapter_parameters, computed_weights, first_names, matching

LARGE = 0.01
"""The share of a model's parameters from which on one that stays dense is worth a word."""


def unpruned(model: Any, weights: Sequence[Weight], keep_dense: Sequence[str]) -> Iterator[str]:
    """What to warn of: weights computed from others, and large parameters of no known kind of layer.

    Args:
        weights: those that may become sparse.
        keep_dense: names or globs of what is meant to stay dense.
    """
    if computed := computed_and_dense(model, weights, keep_dense):
        yield (
            f"not pruned, since computed from other parameters (as by weight_norm): {_listed(computed)}; remove the "
            f"parametrization first, or name them in keep_dense=[...]"
        )
    if large := large_and_dense(model, weights, keep_dense):
        yield (
            f"left dense, being the weight of no known kind of layer: {_listed(large)}; name them in include=[...] to "
            f"prune them, or in keep_dense=[...]"
        )


def computed_and_dense(model: Any, weights: Sequence[Weight], keep_dense: Sequence[str]) -> list[str]:
    """Layers whose weight is computed, unless the parameters it is computed from are pruned or meant to be dense."""
    computed = computed_weights(model)
    named = _matched(keep_dense, [*computed, *itertools.chain.from_iterable(computed.values())])
    known = named | {weight.parameter for weight in weights}
    return [name for name, sources in computed.items() if name not in named and known.isdisjoint(sources)]


def large_and_dense(model: Any, weights: Sequence[Weight], keep_dense: Sequence[str]) -> list[str]:
    """Matrices with at least 1 % of the model's parameters that are not pruned, and not meant to be dense."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    least = LARGE * sum(map(math.prod, shapes.values()))
    known = {weight.parameter for weight in weights}
    known |= {source for sources in computed_weights(model).values() for source in sources}
    first = first_names(model)
    known |= {first[name] for name in _matched(keep_dense, first)}
    dense = _meant_to_be_dense(model)
    return [
        f"{name} ({'x'.join(map(str, shapes[name]))})"
        for name, parameter in model.named_parameters()
        if len(shapes[name]) >= 2
        and shapes[name][0] > 1  # what is added to every example, such as positions, begins with a 1
        and math.prod(shapes[name]) >= least
        and parameter.is_floating_point()
        and name not in known
        and id(parameter) not in dense
        and not any(word in name.lower() for word in ("embed", "bias"))
    ]


def _meant_to_be_dense(model: Any) -> set[int]:
    """The parameters of embeddings, norms and adapters."""
    dense = adapter_parameters(model)
    for module in model.modules():
        if hasattr(module, "num_embeddings") or "Norm" in type(module).__name__:
            dense |= {id(parameter) for parameter in module.parameters(recurse=False)}
    return dense


def _matched(patterns: Sequence[str], names: Iterable[str]) -> set[str]:
    return set(itertools.chain.from_iterable(matching(patterns, names)))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
