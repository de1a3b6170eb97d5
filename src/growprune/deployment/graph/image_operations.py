"""Operations on images that are done on feature-major values as they lie: pools, nearest neighbours, concatenation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx

from growprune.deployment.cpu.geometry import Geometry
from growprune.deployment.cpu.prepared import bind_pool, bind_repeat
from growprune.deployment.graph.lower import Lowering
from growprune.deployment.graph.places import Stored, as_matrix, as_rows, feature_major
from growprune.deployment.graph.program import CallStep, CopyStep
from growprune.deployment.graph.trace import are_float, arguments, aten, pair

MEAN_POOL = partial(bind_pool, is_mean=True)


def max_pool(lowering: Lowering, node: fx.Node) -> Stored | None:
    _, kernel, stride, padding, dilation, ceil_mode = arguments(node, None, None, [], 0, 1, False)
    return _pool(lowering, node, bind_pool, kernel, stride or kernel, padding, dilation, bool(ceil_mode))


def mean_pool(lowering: Lowering, node: fx.Node) -> Stored | None:
    _, kernel, stride, padding, ceil_mode, counts, divisor = arguments(node, None, None, [], 0, False, True, None)
    if divisor is not None or node.kwargs:
        return None
    pool = partial(MEAN_POOL, counts_padding=bool(counts))
    return _pool(lowering, node, pool, kernel, stride or kernel, padding, (1, 1), bool(ceil_mode))


def adaptive_mean_pool(lowering: Lowering, node: fx.Node) -> Stored | None:
    """Where the output divides the input, it is a pool like any other."""
    shape, out = node.args[0].meta["val"].shape, node.meta["val"].shape  # type: ignore[union-attr]
    if len(shape) != 4 or any(a % b for a, b in zip(shape[2:], out[2:], strict=True)):
        return None
    kernel = [a // b for a, b in zip(shape[2:], out[2:], strict=True)]
    return _pool(lowering, node, MEAN_POOL, kernel, kernel, (0, 0), (1, 1), False)


def mean(lowering: Lowering, node: fx.Node) -> Stored | None:
    """Over height and width of images."""
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    axes: Any = node.args[1] if len(node.args) > 1 else None
    is_over_image = len(shape) == 4 and isinstance(axes, (list, tuple)) and sorted(a % 4 for a in axes) == [2, 3]
    if not is_over_image or node.kwargs:
        return None
    return _pool(lowering, node, MEAN_POOL, shape[2:], shape[2:], (0, 0), (1, 1), False)


def _pool(
    lowering: Lowering, node: fx.Node, kind: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> Stored | None:
    x = lowering.stored(node.args[0])
    if x is None or len(x.place.shape) != 4 or as_matrix(x.place, 1, ordered=True) is None:
        return None
    batch, channels, height, width = x.place.shape
    kernel, stride, padding, dilation = map(pair, (kernel, stride, padding, dilation))
    geometry = Geometry(channels, batch, height, width, kernel, stride, padding, dilation, ceil)
    out = lowering.store(feature_major((batch, channels, *geometry.out_size), 1))
    rows = [as_rows(value, 1, ordered=True) for value in (x, out)]
    lowering.add(CallStep(partial(kind, geometry), rows[:1], rows[1:], is_ours=True))
    place = out.place.reshape(node.meta["val"].shape)
    assert place is not None
    return Stored(out.buffer, place)


def nearest(lowering: Lowering, node: fx.Node) -> Stored | None:
    """Nearest neighbours, where the output is a multiple of the input."""
    x, out = lowering.stored(node.args[0]), node.meta["val"].shape
    if x is None or not _is_image(x) or any(a % b for a, b in zip(out[2:], x.place.shape[2:], strict=True)):
        return None
    times = out[2] // x.place.shape[2], out[3] // x.place.shape[3]
    scales = node.args[2] if len(node.args) > 2 else None
    if scales is not None and tuple(scales) != times:  # type: ignore[arg-type]
        return None
    target = lowering.store(feature_major(out, 1))
    _repeat(lowering, x, target, times)
    return target


def concatenate(lowering: Lowering, node: fx.Node) -> Stored | None:
    """The channels of several images, those of which at least one is feature-major already."""
    sources, axis = arguments(node, None, 0)
    shape = node.meta["val"].shape
    is_of_channels = len(shape) == 4 and axis % 4 == 1 and are_float(node, *sources)
    is_of_images = is_of_channels and all(source.meta["val"].dim() == 4 for source in sources)  # not torch's empty ones
    if not is_of_images or not shape.numel() or all(lowering.stored(source) is None for source in sources):
        return None
    target, start = lowering.store(feature_major(shape, 1)), 0
    for source in sources:
        length = source.meta["val"].shape[1]
        place = target.place.narrow(1, start, length)
        assert place is not None
        start, part = start + length, Stored(target.buffer, place)
        x = lowering.stored(source)
        if x is not None and _is_image(x):
            _repeat(lowering, x, part, (1, 1))
        else:
            lowering.add(CopyStep(lowering.value(source), part))
    return target


def _is_image(x: Stored) -> bool:
    return len(x.place.shape) == 4 and as_matrix(x.place, 1, ordered=True) is not None


def _repeat(lowering: Lowering, x: Stored, out: Stored, times: tuple[int, int]) -> None:
    batch, channels, height, width = x.place.shape
    repeat = partial(bind_repeat, Geometry(channels, batch, height, width), times)
    rows = [as_rows(value, 1, ordered=True) for value in (x, out)]
    lowering.add(CallStep(repeat, rows[:1], rows[1:], is_ours=True))


ON_IMAGES: dict[Any, Callable[[Lowering, fx.Node], Stored | None]] = {
    aten.max_pool2d.default: max_pool,
    aten.avg_pool2d.default: mean_pool,
    aten.adaptive_avg_pool2d.default: adaptive_mean_pool,
    aten.mean.dim: mean,
    aten.upsample_nearest2d.vec: nearest,
    aten.cat.default: concatenate,
}
