"""Attention on feature-major queries, keys and values: products of matrices as they lie, with no transposes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from growprune.deployment.lower import Lowering
from growprune.deployment.steps import CallStep, InSlot, Stored
from growprune.deployment.strides import Strides


def attention(lowering: Lowering, node: fx.Node) -> Stored | None:
    """The result is feature-major too: (H, D) are its features, the batch and its tokens its columns."""
    defaults: list[Any] = [None, None, None, None, 0.0, False]
    arguments: list[Any] = [*node.args, *defaults[len(node.args) :]]
    query, key, value, mask, dropout, is_causal = arguments
    options: dict[str, Any] = {"attn_mask": mask, "dropout_p": dropout, "is_causal": is_causal, **node.kwargs}
    stored = [lowering.stored(n) for n in (query, key, value)]
    is_plain = not options["dropout_p"] and not options.get("enable_gqa", False)
    inputs = [v for v in stored if v is not None and len(v.place.shape) == 4 and v.place.torch is not None]
    if len(inputs) < 3 or not is_plain or len({v.place.shape[:2] for v in inputs}) > 1:
        return None
    batch, heads, tokens, features = (*inputs[0].place.shape[:3], inputs[2].place.shape[3])
    place = Strides.ordered((batch, heads, tokens, features), (1, 3, 0, 2))
    out = lowering.store(place)
    given = lowering.value(options["attn_mask"])
    scale = 1 / math.sqrt(inputs[0].place.shape[3]) if (asked := options.get("scale")) is None else asked
    if given is None and options["is_causal"]:
        given = torch.ones(tokens, inputs[1].place.shape[2], dtype=torch.bool).tril()
    if isinstance(given, Stored):
        return None
    fixed = given if isinstance(given, Tensor) else None
    in_slots = [given] if isinstance(given, InSlot) else []
    lowering.add(CallStep(partial(_bind, float(scale), fixed), inputs, [out], in_slots))
    return out


def _bind(
    scale: float, fixed: Tensor | None, query: Tensor, key: Tensor, value: Tensor, out: Tensor
) -> Callable[..., object]:
    batch, heads, tokens, _ = query.shape
    scores = torch.empty(heads, tokens, key.shape[2])
    weights = torch.empty_like(scores)
    zero = torch.zeros(())
    rows = [(query[b], key[b].transpose(1, 2), value[b].transpose(1, 2), out[b].transpose(1, 2)) for b in range(batch)]
    is_direct = rows[0][3].is_contiguous()
    result = torch.empty(rows[0][3].shape)

    def run(mask: Tensor | None = fixed) -> None:
        for b, (q, k, v, o) in enumerate(rows):
            bias = None if mask is None else _of_row(mask, b)
            if bias is not None and bias.dtype != torch.bool:
                torch.baddbmm(bias.expand(scores.shape), q, k, alpha=scale, out=scores)
            else:
                torch.baddbmm(zero.expand(scores.shape), q, k, beta=0, alpha=scale, out=scores)
            if bias is None:
                torch.softmax(scores, -1, out=weights)
                found = weights
            else:
                if bias.dtype == torch.bool:
                    scores.masked_fill_(bias.logical_not(), -torch.inf)
                found = torch._safe_softmax(scores, -1)
            torch.bmm(v, found.transpose(1, 2), out=o if is_direct else result)
            if not is_direct:
                o.copy_(result)

    return run


def _of_row(mask: Tensor, row: int) -> Tensor:
    """The mask of one of a batch, (T, S) or (H, T, S) or what repeats to it."""
    if mask.dim() < 4:
        return mask
    return mask[row if mask.shape[0] > 1 else 0]
