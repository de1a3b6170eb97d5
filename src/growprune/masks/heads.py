"""keep_dense="auto": find the output layers of a model, which have few weights and suffer most from pruning."""

from __future__ import annotations

from typing import Any

from torch import nn

from growprune.masks.layers import is_norm, layer_weights, matches


def heads(model: nn.Module) -> tuple[str, ...]:
    """Return the names of a model's output layers.

    In a model of transformers: the output head and every layer outside its base model. In any other: the last layer.
    A head that is tied to an embedding is never pruned, so it is not listed. If the output is such a matrix used in
    `forward` (`F.linear(h, self.embedding.weight)`), no layer shows it, and the last layer is kept dense all the same.
    """
    layers = list(layer_weights(model))
    outer = _inside_adapters(model)
    if not hasattr(outer, "base_model_prefix"):
        return tuple(layers[-1:] if len(layers) > 1 else ())
    base = getattr(outer, outer.base_model_prefix, None) if outer.base_model_prefix else None
    names = {id(module): name for name, module in model.named_modules()}
    inside = names.get(id(base), "")
    found = [] if not inside else [path for path in layers if not matches(path, inside)]
    output = names.get(id(outer.get_output_embeddings())) if hasattr(outer, "get_output_embeddings") else None
    found += [path for path in layers if path == output and path not in found]
    return tuple(found if len(found) < len(layers) else ())


def _inside_adapters(model: nn.Module) -> Any:
    """The model itself, if PEFT has wrapped it."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model


def is_normalized(model: nn.Module) -> bool:
    """True if a model has a layer such as BatchNorm or RMSNorm, which brings activations to one size.

    >>> is_normalized(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))), is_normalized(nn.Linear(4, 4))
    (True, False)
    """
    return any(map(is_norm, model.modules()))
