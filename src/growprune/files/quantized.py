"""Values in 8 bits: an int8 for each live weight, and a float32 scale for each output row.

A row's scale is its largest absolute value / 127, so the error of a weight is at most half a scale. Pruned weights have
no value, and so stay exact zeros; live weights that round to 0 stay live.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from growprune.errors import GrowpruneError

QUANTIZABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LARGEST = 127
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""The scale of a row of zeros, and of rows so small that theirs would lose precision."""


class Quantized(NamedTuple):
    """Live values in 8 bits."""

    values: Tensor
    """int8: the live values, in row-major order."""
    scales: Tensor
    """float32, one per row."""
    error: float
    """The norm of the difference to the values before, relative to their norm."""


def check_values(values: str | None) -> None:
    """Raise unless this names a way to store values."""
    if values not in (None, "int8"):
        raise GrowpruneError(f"values must be 'int8', or None for the model's own dtype, got {values!r}")


def scale_shape(shape: Sequence[int], *, transposed: bool = False, stacked: bool = False) -> tuple[int, ...]:
    """Return the shape of a parameter's scales: its own, with 1 for each dimension that is not of output rows.

    >>> scale_shape((8, 3, 5, 5)), scale_shape((3, 8), transposed=True), scale_shape((4, 8, 3), stacked=True)
    ((8, 1, 1, 1), (1, 8), (4, 8, 1))
    """
    rows = {int(stacked) + int(transposed)} | ({0} if stacked else set())
    return tuple(length if dim in rows else 1 for dim, length in enumerate(shape))


def rows_of_live(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the output row of each live weight, for scales of this shape."""
    return _of_each(torch.arange(math.prod(shape), device=mask.device).view(shape), mask)


def _of_each(rows: Tensor, mask: Tensor) -> Tensor:
    """Return what belongs to the row of each live weight."""
    within = [dim for dim, length in enumerate(rows.shape) if length == 1]
    if within and within == list(range(within[0], mask.ndim)):  # rows lie one after the other, so counts are enough
        return rows.reshape(-1).repeat_interleave(mask.sum(within).reshape(-1))
    return rows.expand(mask.shape).masked_select(mask)


def quantize(values: Tensor, row: Tensor, num_rows: int, name: str) -> Quantized:
    """Round live values to 8 bits. In 16 bits, rounding what was rounded before changes nothing.

    Args:
        values: the live values.
        row: the output row of each.
        name: the parameter, for errors.

    Examples:
        >>> found = quantize(torch.tensor([1.27, -2.0, 254.0]), torch.tensor([0, 1, 1]), 2, "weight")
        >>> found.values.tolist(), [round(scale, 4) for scale in found.scales.tolist()]
        ([127, -1, 127], [0.01, 2.0])
    """
    if values.dtype not in QUANTIZABLE:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in QUANTIZABLE)
        raise GrowpruneError(f"{name} has dtype {values.dtype}, int8 values are for {allowed}: save it as it is")
    exact = values.double() if values.dtype == torch.float64 else values.float()
    largest = exact.new_zeros(num_rows).scatter_reduce_(0, row, exact.abs(), "amax")
    scales = (largest / LARGEST).float().clamp_(min=SMALLEST_SCALE)
    small = (exact / scales[row]).round_().clamp_(-LARGEST, LARGEST)
    norm = float(exact.double().norm())
    changed = float(((small.float() * scales[row]).double() - exact.double()).norm())
    error = changed / norm if norm else 0.0 * norm
    if not error < float("inf"):  # a NaN neither
        raise GrowpruneError(f"{name} has values that are not finite, or too large for int8 with float32 scales")
    return Quantized(small.to(torch.int8), scales, error)


def dequantize(values: Tensor, scales: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return live values in a dtype, from 8 bits: each is multiplied by the scale of its row, in float32."""
    return (values.float() * _of_each(scales, mask)).to(dtype)
