"""`generate` of transformers on a deployed model: the decode step as a CUDA graph, where transformers would compile it.

transformers reads the prompt with the model itself, then asks the model for its compiled call, if the cache is static.
We give it a call that records the step. Beam search never asks, so it runs without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from growprune.deployment.cuda.graphs import graphed
from growprune.deployment.cuda.linear import FEW_ROUNDS
from growprune.deployment.cuda.products import MOST_SAMPLES

KEPT_OUTPUTS = ("output_attentions", "output_hidden_states")
"""What makes `generate` keep outputs that the next replay would overwrite."""

TENSOR = object()
"""The place of a tensor among arguments that are the same in every step."""


def prepare_generation(model: nn.Module) -> None:
    """Let `generate` of a transformers model use a static cache and record its decode step; others are left alone."""
    if not callable(getattr(model, "get_compiled_call", None)) or not hasattr(model, "generation_config"):
        return
    model.generation_config.cache_implementation = "static"  # type: ignore[union-attr]
    step = DecodeStep(model.forward)
    vars(model)["get_compiled_call"] = lambda compile_config=None: step


class DecodeStep:
    """A model's forward for one token of each sample, recorded when shapes or the cache are new."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._recorded: Callable[..., Any] | None = None
        self._key: Any = None
        self._cache: Sequence[Tensor] = ()  # what the graph writes to, and so keeps alive

    def __call__(self, **inputs: Any) -> Any:
        """Run the step. What it returns is overwritten by the next one, except for `generate`, which copies."""
        if not can_be_recorded(inputs):
            return self._forward(**inputs)
        cache = inputs.pop("past_key_values")
        leaves, spec = pytree.tree_flatten(inputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        rest = [TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        kept = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values, layer.cumulative_length)]
        key = spec, rest, [(tensor.shape, tensor.dtype) for tensor in tensors]
        is_same_cache = len(kept) == len(self._cache) and all(map(_is, kept, self._cache))
        if self._recorded is None or key != self._key or not is_same_cache:
            self._recorded = None  # frees the memory of the old graph first
            self._recorded = self._record(cache, tensors, rest, spec)
            self._key, self._cache = key, kept
        return self._recorded(*tensors)

    def _record(self, cache: Any, tensors: Sequence[Tensor], rest: Sequence[Any], spec: Any) -> Callable[..., Any]:
        def step(*given: Tensor) -> Any:
            left = iter(given)
            leaves = [next(left) if leaf is TENSOR else leaf for leaf in rest]
            return self._forward(**pytree.tree_unflatten(leaves, spec), past_key_values=cache)

        def put_back() -> None:
            for layer, length in zip(cache.layers, lengths, strict=True):
                layer.cumulative_length.copy_(length)

        lengths = [layer.cumulative_length.clone() for layer in cache.layers]
        return graphed(step, *tensors, put_back=put_back)


def _is(one: Tensor, other: Tensor) -> bool:
    return one is other


def can_be_recorded(inputs: Mapping[str, Any]) -> bool:
    """True for one token of each of up to 64 samples and a static cache, if all outputs but logits are dropped."""
    tokens, cache = inputs.get("input_ids"), inputs.get("past_key_values")
    layers = getattr(cache, "layers", None) or [None]
    is_static = all(type(layer).__name__ == "StaticLayer" and layer.is_initialized for layer in layers)
    is_known = all(hasattr(layer, "cumulative_length") for layer in layers)  # not in every version of transformers
    is_few = isinstance(tokens, Tensor) and tokens.shape[1:] == (1,) and len(tokens) <= FEW_ROUNDS * MOST_SAMPLES
    return is_static and is_known and is_few and not any(inputs.get(name) for name in KEPT_OUTPUTS)
