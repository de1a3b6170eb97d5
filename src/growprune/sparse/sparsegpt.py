"""SparseGPT (Frantar & Alistarh 2023, arXiv 2301.00774): prune by columns, and adjust later columns to compensate.

With H = X^T X over the inputs X of a layer, the output error of a row is d H d^T for its change d. To make w_j zero
costs w_j^2 / [H^-1]_jj, if the columns after it take on -w_j / [H^-1]_jj * [H^-1]_j. Once column j is done it does not
change any more, so H^-1 is that of the columns from j on; the upper Cholesky factor U of H^-1 = U^T U holds all of
these: [H_{j:}^-1]_j = U_jj * U_j. So the cost is (w_j / U_jj)^2, and what follows changes by -w_j / U_jj * U_j.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from growprune.masks.patterns import NofM, Pattern
from growprune.sparse.group_choice import chosen_in_all, group_keys, num_choosable, shares

COLUMNS = 128
"""The columns that are chosen from at once, as in the paper. The columns after them are updated once."""

LEAST_COLUMNS, SHARE = 16, 8
"""Small layers use an eighth of their columns, at least 16. With all at once, the adjustments would have no effect."""

DAMPENING = 0.01
"""What is added to the diagonal of H, as a share of its mean."""


def inverse_factor(products: Tensor, dampening: float = DAMPENING) -> tuple[Tensor, float]:
    """Return the upper Cholesky factors of the inverses of X^T X, and the dampening that was needed.

    Args:
        products: (row groups, inputs, inputs).
        dampening: raised tenfold until the matrices can be inverted.

    Examples:
        >>> inverse_factor(torch.tensor([[[3.0, 0.0], [0.0, 15.0]]]), dampening=1 / 9)[0].tolist()
        [[[0.5, 0.0], [0.0, 0.25]]]
    """
    means = products.diagonal(dim1=1, dim2=2).div(products.shape[1]).sum(1, keepdim=True)
    means = torch.where(means > 0, means, 1)  # a layer whose inputs are all zero: weights count by their magnitude
    root = 2.0 ** round(math.log2(means.max()) / 2)  # compute with H / root^2: no sum overflows, and no bit changes
    while True:
        # H = R R^T with an upper R, by way of the lower factor of H turned around; then H^-1 = R^-T R^-1
        turned = products.flip(1, 2).div_(root).div_(root)
        turned.diagonal(dim1=1, dim2=2).add_(dampening * (means / root / root))
        lower, info = torch.linalg.cholesky_ex(turned)
        if not info.any():
            break
        dampening *= 10
    del turned  # each is as large as H
    upper = lower.flip(1, 2)
    del lower
    identity = torch.eye(upper.shape[1], dtype=upper.dtype, device=upper.device)
    return torch.linalg.solve_triangular(upper, identity.expand_as(upper), upper=True).div_(root), dampening


def sparsegpt_pruned(
    matrix: Tensor, alive: Tensor, factor: Tensor, kept: int, pattern: Pattern
) -> tuple[Tensor, Tensor]:
    """Return the mask of a matrix (outputs, inputs), and its values adjusted for the pruned weights.

    Args:
        alive: which weights are live now; no others are chosen.
        factor: the result of `inverse_factor`, (row groups, inputs, inputs). The rows form as many equal groups.
        kept: how many groups of the pattern are live in the end.
    """
    width, kept_of = _windows(matrix, alive, kept, pattern)
    block = -(-COLUMNS // width) * width
    mask = torch.zeros_like(alive)
    values = matrix.clone().view(len(factor), -1, matrix.shape[1])  # (row groups, rows, columns)
    diagonal = factor.diagonal(dim1=1, dim2=2).unsqueeze(1)
    for start in range(0, matrix.shape[1], block):
        end = min(start + block, matrix.shape[1])
        errors = torch.zeros_like(values[:, :, start:end])
        for j in range(start, end):
            if j % width == 0:
                window = slice(j, min(j + width, end))
                scores = (values[:, :, window] / diagonal[:, :, window]).square_().flatten(0, 1)
                mask[:, window] = chosen_in_all(pattern, scores, alive[:, window], kept_of[j // width])
            dead = ~mask[:, j].view(len(factor), -1)
            error = errors[:, :, j - start] = values[:, :, j] / diagonal[:, :, j] * dead
            values[:, :, j:end] -= error.unsqueeze(2) * factor[:, j, j:end].unsqueeze(1)
        values[:, :, end:] -= errors @ factor[:, start:end, end:]
    return mask, values.view(matrix.shape)


def _windows(matrix: Tensor, alive: Tensor, kept: int, pattern: Pattern) -> tuple[int, list[int]]:
    """Return how many columns are chosen from at once, and how many groups are live in each such window.

    N:M at its full density is chosen in windows of M inputs, as late as possible.
    """
    narrow = pattern.m if isinstance(pattern, NofM) else pattern.width
    at_once = min(COLUMNS, max(LEAST_COLUMNS, matrix.shape[1] // SHARE))
    width = -(-at_once // narrow) * narrow
    capacity = _capacity(matrix, alive, width, pattern)
    if isinstance(pattern, NofM) and kept == sum(capacity):
        width, capacity = narrow, _capacity(matrix, alive, narrow, pattern)
    return width, shares(kept, capacity)


def _capacity(matrix: Tensor, alive: Tensor, width: int, pattern: Pattern) -> list[int]:
    """Return the most groups that may be live in each window of columns."""
    ones = torch.ones_like(matrix)
    pairs = zip(ones.split(width, 1), alive.split(width, 1), strict=True)  # type: ignore[no-untyped-call]
    return [sum(num_choosable(group_keys(pattern, some, mask))) for some, mask in pairs]
