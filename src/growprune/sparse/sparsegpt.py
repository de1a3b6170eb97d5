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
from growprune.sparse.group_choice import chosen_in_all, group_keys, num_choosable

COLUMNS = 128
"""The columns that are chosen from at once, as in the paper. The columns after them are updated once."""

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

    The costs of all weights, before any is adjusted, say how many groups each block of `COLUMNS` keeps. The paper gives
    each block the same share, which costs more where inputs differ in size.

    Args:
        alive: which weights are live now; no others are chosen.
        factor: the result of `inverse_factor`, (row groups, inputs, inputs). The rows form as many equal groups.
        kept: how many groups of the pattern are live in the end.
    """
    values = matrix.clone().view(len(factor), -1, matrix.shape[1])  # (row groups, rows, columns)
    diagonal = factor.diagonal(dim1=1, dim2=2).unsqueeze(1)
    costs = (values / diagonal).square_().flatten(0, 1)
    first = chosen_in_all(pattern, costs, alive, kept)  # which says how many groups live in each block of columns
    narrow = pattern.m if isinstance(pattern, NofM) else pattern.width
    is_full = isinstance(pattern, NofM) and kept == sum(num_choosable(group_keys(pattern, costs, alive)))
    width = narrow if is_full else -(-COLUMNS // narrow) * narrow  # N:M at its full density is chosen late
    block = -(-COLUMNS // width) * width
    mask = torch.zeros_like(alive)
    for start in range(0, matrix.shape[1], block):
        end = min(start + block, matrix.shape[1])
        errors = torch.zeros_like(values[:, :, start:end])
        for j in range(start, end):
            if j % width == 0:
                window = slice(j, min(j + width, end))
                count = sum(num_choosable(group_keys(pattern, costs[:, window], first[:, window])))
                scores = (values[:, :, window] / diagonal[:, :, window]).square_().flatten(0, 1)
                mask[:, window] = chosen_in_all(pattern, scores, alive[:, window], count)
            dead = ~mask[:, j].view(len(factor), -1)
            error = errors[:, :, j - start] = values[:, :, j] / diagonal[:, :, j] * dead
            values[:, :, j:end] -= error.unsqueeze(2) * factor[:, j, j:end].unsqueeze(1)
        values[:, :, end:] -= errors @ factor[:, start:end, end:]
    return mask, values.view(matrix.shape)
