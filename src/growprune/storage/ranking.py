"""Find the largest weights of many tensors at once on a GPU, without copies, with at most one wait for the device.

The choice is bit-identical to that of `masks.ranking` by magnitude, with the same radix select. But digits are counted
in Triton, and the intermediate results stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from growprune.storage import kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def can_keep_largest(values: Sequence[Tensor]) -> bool:
    """True if `keep_largest` supports these: contiguous floats of one dtype, on one GPU that Triton supports."""
    first = values[0]
    return (
        first.is_cuda
        and kernels.can_zero_off(first.device)
        and first.dtype in DTYPES
        and all(v.is_contiguous() and v.dtype == first.dtype and v.device == first.device for v in values)
    )


def keep_largest(
    values: Sequence[Tensor], masks: Sequence[Tensor], pools: Sequence[int], kept: Sequence[int]
) -> list[Tensor] | None:
    """Keep the `kept` largest live weights of each pool; of equal ones, the first.

    Args:
        values: tensors that `can_keep_largest`.
        masks: their masks, contiguous bool.
        pools: for each tensor, the number of its pool.
        kept: for each pool, how many weights stay, at most those that are live.

    Returns:
        The new masks; None if a live weight is not finite.
    """
    from growprune.storage import triton_ranking

    with torch.cuda.device(values[0].device):  # Triton starts kernels on the current one
        return triton_ranking.keep_largest(values, masks, pools, kept)
