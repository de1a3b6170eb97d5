"""Operations other than layers that work on feature-major values without copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from growprune.deployment.cpu.geometry import Geometry
from growprune.deployment.cpu.prepared import PoolLayer
from growprune.deployment.graph.lower import Lowering, largest
from growprune.deployment.graph.places import InSlot, Stored, Strides, as_matrix, as_rows, feature_major, with_features
from growprune.deployment.graph.program import CallStep, CopyStep, TorchStep
from growprune.deployment.graph.trace import are_float, arguments, aten, pair

POINTWISE: dict[Any, Any] = {
    aten.add.Tensor: aten.add.out,
    aten.sub.Tensor: aten.sub.out,
    aten.mul.Tensor: aten.mul.out,
    aten.div.Tensor: aten.div.out,
    aten.gelu.default: aten.gelu.out,
    aten.silu.default: aten.silu.out,
    aten.tanh.default: aten.tanh.out,
    aten.sigmoid.default: aten.sigmoid.out,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Scalar_out,
    aten.hardtanh.default: aten.hardtanh.out,
    aten.leaky_relu.default: aten.leaky_relu.out,
    aten.relu.default: aten.relu.out,
}
"""Elementwise operations, and their variants that write to a given tensor."""


def pointwise(lowering: Lowering, node: fx.Node) -> Stored | None:
    """Lower an elementwise operation. Its result has the layout of its first operand of full shape."""
    value = node.meta["val"]
    operands = [found for n in node.all_input_nodes if (found := lowering.stored(n)) is not None]
    like = next((v for v in operands if v.place.torch is not None and v.place.shape == tuple(value.shape)), None)
    if like is None or not are_float(node):
        return None
    given = lowering.arguments_in_torch(node)
    assert like.place.torch is not None
    shape, strides = like.place.torch
    out = lowering.store(Strides.ordered(shape, sorted(range(len(shape)), key=lambda axis: -strides[axis])))
    lowering.add(TorchStep(POINTWISE[node.target], *given, None, out, largest(node)))
    return out


def layer_norm(lowering: Lowering, node: fx.Node) -> Stored | None:
    """Lower a layer norm over the features, which are the last dimension."""
    source, shape, gain, shift, epsilon = arguments(node, None, None, None, None, 1e-5)[:5]
    x = lowering.stored(source)
    if x is None or len(shape) != 1 or as_matrix(x.place, len(x.place.shape) - 1) is None:
        return None
    gain, shift = (lowering.value(n) for n in (gain, shift))
    if not all(n is None or isinstance(n, Tensor) for n in (gain, shift)):
        return None
    axis = len(x.place.shape) - 1
    out = lowering.store(with_features(x.place, axis, x.place.shape[axis]))
    scratch = lowering.store(out.place)
    make = partial(_norm, gain, shift, float(epsilon))
    lowering.add(CallStep(make, [as_rows(x, axis)], [as_rows(out, axis), as_rows(scratch, axis)]))
    return out


def _norm(
    gain: Tensor | None, shift: Tensor | None, epsilon: float, x: Tensor, out: Tensor, squares: Tensor
) -> Callable[[], object]:
    """Compute means as products with a row of 1 / d, because torch's reductions over rows are several times slower."""
    averaging = torch.full((1, x.shape[0]), 1 / x.shape[0])
    mean, scale = torch.empty(1, x.shape[1]), torch.empty(1, x.shape[1])
    gain, shift = (None if t is None else t.view(-1, 1) for t in (gain, shift))

    def run() -> None:
        torch.mm(averaging, x, out=mean)
        torch.sub(x, mean, out=out)
        torch.mul(out, out, out=squares)
        torch.mm(averaging, squares, out=scale)
        scale.add_(epsilon).rsqrt_()
        out.mul_(scale)
        if gain is not None:
            out.mul_(gain)
        if shift is not None:
            out.add_(shift)

    return run


def attention(lowering: Lowering, node: fx.Node) -> Stored | None:
    """Lower attention to matrix products in the present layout, without transposes.

    The result is feature-major too: its features are (H, D), its columns are batch and tokens.
    """
    query, key, value, mask, dropout, is_causal = arguments(node, None, None, None, None, 0.0, False)
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
    lowering.add(CallStep(partial(_attend, float(scale), fixed), inputs, [out], in_slots))
    return out


def _attend(
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
            bias = mask
            if mask is not None and mask.dim() == 4:  # others broadcast to (H, T, S)
                bias = mask[b if mask.shape[0] > 1 else 0]
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


# Images: pools, concatenation


def max_pool(lowering: Lowering, node: fx.Node) -> Stored | None:
    _, kernel, stride, padding, dilation, ceil_mode = arguments(node, None, None, [], 0, 1, False)
    window = (pair(kernel), pair(stride or kernel), pair(padding), pair(dilation), bool(ceil_mode))
    return _pool(lowering, node, *window, is_mean=False)


def mean(lowering: Lowering, node: fx.Node) -> Stored | None:
    """Lower a mean over equal windows without overlap, such as the whole image."""
    shape, out = node.args[0].meta["val"].shape, node.meta["val"].shape  # type: ignore[union-attr]
    if len(shape) != 4 or node.kwargs:
        return None
    if node.target is aten.mean.dim:
        axes = node.args[1]
        if not isinstance(axes, (list, tuple)) or sorted(int(axis) % 4 for axis in axes) != [2, 3]:  # type: ignore[arg-type]
            return None
        out = (*shape[:2], 1, 1)
    if any(a % b for a, b in zip(shape[2:], out[2:], strict=True)):
        return None
    kernel = pair([a // b for a, b in zip(shape[2:], out[2:], strict=True)])
    return _pool(lowering, node, kernel, kernel, is_mean=True)


def _pool(lowering: Lowering, node: fx.Node, *window: Any, is_mean: bool) -> Stored | None:
    x = lowering.stored(node.args[0])
    if x is None or len(x.place.shape) != 4 or as_matrix(x.place, 1, ordered=True) is None:
        return None
    batch, channels, height, width = x.place.shape
    geometry = Geometry(channels, batch, height, width, *window)
    out = lowering.store(feature_major((batch, channels, *geometry.out_size), 1))
    rows = [as_rows(value, 1, ordered=True) for value in (x, out)]
    lowering.add(CallStep(PoolLayer(geometry, is_mean=is_mean).bind, rows[:1], rows[1:], is_ours=True))
    place = out.place.reshape(node.meta["val"].shape)
    assert place is not None
    return Stored(out.buffer, place)


def concatenate(lowering: Lowering, node: fx.Node) -> Stored | None:
    """Lower a concatenation of channels of images, if at least one input is stored already."""
    sources, axis = arguments(node, None, 0)
    shape = node.meta["val"].shape
    is_of_channels = len(shape) == 4 and axis % 4 == 1 and are_float(node, *sources)
    is_of_images = is_of_channels and all(source.meta["val"].dim() == 4 for source in sources)  # torch takes vectors
    if not is_of_images or not shape.numel() or all(lowering.stored(source) is None for source in sources):
        return None
    target, start = lowering.store(feature_major(shape, 1)), 0
    for source in sources:
        length = source.meta["val"].shape[1]
        place = target.place.narrow(1, start, length)
        assert place is not None
        start, part = start + length, Stored(target.buffer, place)
        x = lowering.stored(source)
        if x is not None and as_matrix(x.place, 1, ordered=True) is not None:
            rows = [as_rows(value, 1, ordered=True) for value in (x, part)]
            copy = PoolLayer(Geometry.linear(length, math.prod(shape) // shape[1]))
            lowering.add(CallStep(copy.bind, rows[:1], rows[1:], is_ours=True))
        else:
            lowering.add(CopyStep(lowering.value(source), part))
    return target


KNOWN: dict[Any, Callable[[Lowering, fx.Node], Any]] = {
    **dict.fromkeys(POINTWISE, pointwise),
    aten.layer_norm.default: layer_norm,
    aten.max_pool2d.default: max_pool,
    aten.adaptive_avg_pool2d.default: mean,
    aten.mean.dim: mean,
    aten.cat.default: concatenate,
    aten.scaled_dot_product_attention.default: attention,
}
