"""Choose the live groups of a matrix (outputs x inputs) by data, one layer at a time: Wanda and SparseGPT.

Patterns, keys and the breaking of ties (earlier positions win) are the same as for every other edit.

SparseGPT (Frantar & Alistarh 2023, arXiv 2301.00774) prunes by columns, and adjusts later columns to compensate. With
H = X^T X over the inputs X of a layer, the output error of a row is d H d^T for its change d. To make w_j zero costs
w_j^2 / [H^-1]_jj, if the columns after it take on -w_j / [H^-1]_jj * [H^-1]_j. Once column j is done it does not change
any more, so H^-1 is that of the columns from j on; the upper Cholesky factor U of H^-1 = U^T U holds all of these:
[H_{j:}^-1]_j = U_jj * U_j. So the cost is (w_j / U_jj)^2, and what follows changes by -w_j / U_jj * U_j.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from growprune.masks.layers import Weight
from growprune.masks.patterns import Folded, NofM, Pattern
from growprune.masks.ranking import magnitude_keys

FOLDED = Folded()
"""Reads a weight as a matrix whose rows are outputs, and whose columns are inputs, kernel position by position."""


def to_matrix(tensor: Tensor, weight: Weight) -> Tensor:
    """Return a weight as a matrix (outputs, inputs)."""
    return FOLDED.fold(FOLDED.rows_first(tensor, weight))


def write_matrix(matrix: Tensor, tensor: Tensor, weight: Weight) -> None:
    """The inverse of `to_matrix`: fill a tensor shaped like the weight."""
    rows = FOLDED.rows_first(tensor, weight)
    rows.copy_(FOLDED.unfold(matrix, rows))


def group_keys(pattern: Pattern, scores: Tensor, alive: Tensor) -> Tensor:
    """Return the keys of a matrix's groups, one row of keys per row of groups. Larger is better; 0 may not be chosen.

    Args:
        scores: not negative; a block has the sum of its scores.
        alive: which weights are live now.
    """
    keys = magnitude_keys(pattern.score(scores)).mul_(pattern.alive(alive))
    return pattern.restrict(keys).view(-(-len(scores) // pattern.height), -1)


def keep_best(keys: Tensor, kept: Sequence[int]) -> Tensor:
    """Return which keys are among the best of their row. Each row keeps its own number."""
    best_first = keys.argsort(dim=1, descending=True, stable=True)
    places = torch.arange(keys.shape[1], device=keys.device)
    is_kept = places < torch.tensor(kept, device=keys.device).unsqueeze(1)
    return torch.zeros_like(keys, dtype=torch.bool).scatter_(1, best_first, is_kept)


def shares(total: int, capacity: Sequence[int]) -> list[int]:
    """Divide a total into integers in proportion to `capacity`, none above its `capacity`."""
    whole = max(1, sum(capacity))
    return [after - before for before, after in pairwise(total * r // whole for r in accumulate(capacity, initial=0))]


def chosen_by_row(pattern: Pattern, scores: Tensor, alive: Tensor, kept: int) -> Tensor:
    """Return the mask with the best groups of each row, with about the same number in each."""
    keys = group_keys(pattern, scores, alive)
    return pattern.expand(keep_best(keys, shares(kept, num_choosable(keys))).flatten(), *scores.shape)


def chosen_in_all(pattern: Pattern, scores: Tensor, alive: Tensor, kept: int) -> Tensor:
    """Return the mask with the best groups of all rows together."""
    groups = keep_best(group_keys(pattern, scores, alive).view(1, -1), [kept])
    return pattern.expand(groups.flatten(), *scores.shape)


def num_choosable(keys: Tensor) -> list[int]:
    """Return how many groups of each row may be chosen."""
    return torch.count_nonzero(keys, dim=1).tolist()


def wanda_scores(matrix: Tensor, squares: Tensor) -> Tensor:
    """Return the scores of a matrix (outputs, inputs) by Wanda (Sun et al. 2023, arXiv 2306.11695).

    A weight scores |w| times the norm of its input, because w * x is what it adds to its output.

    Args:
        squares: the sums of the squares of the inputs, (row groups, inputs). The rows form as many equal groups.
    """
    norms = squares.sqrt().unsqueeze(1)
    return (matrix.abs().view(len(squares), -1, matrix.shape[1]) * norms).view(matrix.shape)


COLUMNS = 128
"""The columns that are chosen from at once, as in the paper. The columns after them are updated once."""

DAMPENING = 0.01
"""What is added to the diagonal of H, as a share of its mean."""


def inverse_factor(products: Tensor, dampening: float = DAMPENING) -> tuple[Tensor, float]:
    """Return the upper Cholesky factors of the inverses of X^T X, and the dampening that was needed.

    Args:
        products: (row groups, inputs, inputs).
        dampening: raised tenfold until the matrices can be inverted.
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
