"""Which weights are the largest, of many tensors at once on a GPU: no copy, no chunk, one wait for the device at most.

What `masks.ranking` chooses of magnitude keys, this chooses too, bit for bit, by the same radix select; but the
digits are counted in Triton, and prefix and place stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from growprune.storage import kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def can_keep_largest(values: Sequence[Tensor]) -> bool:
    """Whether `keep_largest` takes these: contiguous floats of one kind, on one GPU that Triton knows."""
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
    """Which of the live weights of each pool are its `kept` largest; of equal ones, the first.

    Args:
        values: tensors that `can_keep_largest`.
        masks: which of their weights live, contiguous bool.
        pools: for each tensor, the number of the pool it is ranked in.
        kept: for each pool, how many weights stay; at most those that live.

    Returns:
        The new masks; None if a live weight is not finite.
    """
    from growprune.storage import triton_ranking

    with torch.cuda.device(values[0].device):  # Triton starts kernels on the current one
        return triton_ranking.keep_largest(values, masks, pools, kept)
