"""Operations, beside layers, that are done on feature-major values as they lie."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from growprune.deployment.attention import attention
from growprune.deployment.geometry import Geometry
from growprune.deployment.lower import Lowering, is_float
from growprune.deployment.pooling import MaxPool, MeanPool
from growprune.deployment.steps import CallStep, Stored, TorchStep
from growprune.deployment.strides import Strides, as_matrix, feature_major, with_features
from growprune.deployment.trace import aten

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
"""Operations of each number by itself, and their variants that write to a given place."""


def pointwise(lowering: Lowering, node: fx.Node) -> Stored | None:
    """Where its first operand of full shape lies, so the result does."""
    value = node.meta["val"]
    operands = [found for n in node.all_input_nodes if (found := lowering.stored(n)) is not None]
    like = next((v for v in operands if v.place.torch is not None and v.place.shape == tuple(value.shape)), None)
    if like is None or not is_float(value):
        return None
    args, kwargs = (lowering.as_torch(fx.map_arg(part, lowering.value)) for part in (node.args, dict(node.kwargs)))
    out = lowering.store(_dense(like.place))
    lowering.add(TorchStep(POINTWISE[node.target], tuple(args), dict(kwargs), None, out))
    return out


def _dense(place: Strides) -> Strides:
    """A place of its own in the same order, without gaps."""
    assert place.torch is not None
    shape, strides = place.torch
    return Strides.ordered(shape, sorted(range(len(shape)), key=lambda axis: -strides[axis]))


def layer_norm(lowering: Lowering, node: fx.Node) -> Stored | None:
    """Over the features, which are the last dimension."""
    source, shape, gain, shift, epsilon = [*node.args, None, None, 1e-5][:5]
    x = lowering.stored(source)
    if x is None or len(shape) != 1 or as_matrix(x.place, len(x.place.shape) - 1) is None:  # type: ignore[arg-type]
        return None
    gain, shift = (lowering.value(n) for n in (gain, shift))
    if not all(n is None or isinstance(n, Tensor) for n in (gain, shift)):
        return None
    axis = len(x.place.shape) - 1
    out = lowering.store(with_features(x.place, axis, x.place.shape[axis]))
    make = partial(_norm, gain, shift, float(epsilon))  # type: ignore[arg-type]
    scratch = lowering.store(out.place)
    lowering.add(CallStep(make, [_as_rows(x)], [_as_rows(out), _as_rows(scratch)]))
    return out


def _as_rows(value: Stored) -> Stored:
    """The matrix of a value, whose features are its last dimension."""
    matrix = as_matrix(value.place, len(value.place.shape) - 1)
    assert matrix is not None
    rows = ((matrix.rows, matrix.step),) if matrix.rows > 1 else ()
    columns = ((matrix.columns, 1),) if matrix.columns > 1 else ()
    return Stored(value.buffer, Strides((rows, columns), matrix.offset))


def _norm(
    gain: Tensor | None, shift: Tensor | None, epsilon: float, x: Tensor, out: Tensor, squares: Tensor
) -> Callable[[], object]:
    """Means as products with a row of 1 / d: torch's own reductions down the rows are several times slower."""
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


def max_pool(lowering: Lowering, node: fx.Node) -> Stored | None:
    defaults: list[Any] = [None, None, [], [0, 0], [1, 1], False]
    given: list[Any] = [*node.args, *defaults[len(node.args) :]]
    _, kernel, stride, padding, dilation, ceil_mode = given
    return _pool(lowering, node, MaxPool, kernel, stride or kernel, padding, dilation, bool(ceil_mode))


def mean_pool(lowering: Lowering, node: fx.Node) -> Stored | None:
    defaults: list[Any] = [None, None, [], [0, 0], False, True, None]
    given: list[Any] = [*node.args, *defaults[len(node.args) :]]
    _, kernel, stride, padding, ceil_mode, counts, divisor = given
    if divisor is not None or node.kwargs:
        return None
    pool = partial(MeanPool, counts_padding=bool(counts))
    return _pool(lowering, node, pool, kernel, stride or kernel, padding, (1, 1), bool(ceil_mode))


def adaptive_mean_pool(lowering: Lowering, node: fx.Node) -> Stored | None:
    """Where the output divides the input, it is a pool like any other."""
    shape, out = node.args[0].meta["val"].shape, node.meta["val"].shape  # type: ignore[union-attr]
    if len(shape) != 4 or any(a % b for a, b in zip(shape[2:], out[2:], strict=True)):
        return None
    kernel = [a // b for a, b in zip(shape[2:], out[2:], strict=True)]
    return _pool(lowering, node, MeanPool, kernel, kernel, (0, 0), (1, 1), False)


def mean(lowering: Lowering, node: fx.Node) -> Stored | None:
    """Over height and width of images."""
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    axes: Any = node.args[1] if len(node.args) > 1 else None
    is_over_image = len(shape) == 4 and isinstance(axes, (list, tuple)) and sorted(a % 4 for a in axes) == [2, 3]
    if not is_over_image or node.kwargs:
        return None
    return _pool(lowering, node, MeanPool, shape[2:], shape[2:], (0, 0), (1, 1), False)


def _pool(
    lowering: Lowering, node: fx.Node, kind: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> Stored | None:
    x = lowering.stored(node.args[0])
    if x is None or len(x.place.shape) != 4 or as_matrix(x.place, 1, ordered=True) is None:
        return None
    batch, channels, height, width = x.place.shape
    kernel, stride, padding, dilation = (_pair(pair) for pair in (kernel, stride, padding, dilation))
    geometry = Geometry(channels, batch, height, width, kernel, stride, padding, dilation, ceil)
    out = lowering.store(feature_major((batch, channels, *geometry.out_size), 1))
    rows = [_channels(value) for value in (x, out)]
    lowering.add(CallStep(partial(_bind, kind(geometry)), rows[:1], rows[1:]))
    place = out.place.reshape(node.meta["val"].shape)
    assert place is not None
    return Stored(out.buffer, place)


def _channels(value: Stored) -> Stored:
    matrix = as_matrix(value.place, 1, ordered=True)
    assert matrix is not None
    rows = ((matrix.rows, matrix.step),) if matrix.rows > 1 else ()
    columns = ((matrix.columns, 1),) if matrix.columns > 1 else ()
    return Stored(value.buffer, Strides((rows, columns), matrix.offset))


def _bind(pool: Any, x: Tensor, out: Tensor) -> Callable[[], object]:
    return partial(pool, x, out)


def _pair(values: Any) -> tuple[int, int]:
    first, second = (values, values) if isinstance(values, int) else (values[0], values[-1])
    return int(first), int(second)


KNOWN: dict[Any, Callable[[Lowering, fx.Node], Any]] = {
    **dict.fromkeys(POINTWISE, pointwise),
    aten.layer_norm.default: layer_norm,
    aten.max_pool2d.default: max_pool,
    aten.avg_pool2d.default: mean_pool,
    aten.adaptive_avg_pool2d.default: adaptive_mean_pool,
    aten.mean.dim: mean,
    aten.scaled_dot_product_attention.default: attention,
}
