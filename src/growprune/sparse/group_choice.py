"""Choose the live groups of a matrix (outputs x inputs) by scores, to prune by data one layer at a time.

Patterns, keys and the breaking of ties (earlier positions win) are the same as for every other edit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from growprune.masks.layers import Weight
from growprune.masks.patterns import Folded, Pattern
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
    """Return which keys are among the best of their row. Each row keeps its own number.

    >>> keep_best(torch.tensor([[3, 1, 2], [5, 5, 5]]), [1, 2]).tolist()
    [[True, False, False], [True, True, False]]
    """
    best_first = keys.argsort(dim=1, descending=True, stable=True)
    places = torch.arange(keys.shape[1], device=keys.device)
    is_kept = places < torch.tensor(kept, device=keys.device).unsqueeze(1)
    return torch.zeros_like(keys, dtype=torch.bool).scatter_(1, best_first, is_kept)


def shares(total: int, capacity: Sequence[int]) -> list[int]:
    """Divide a total into integers in proportion to `capacity`, none above its `capacity`.

    >>> shares(5, [3, 3, 3]), shares(4, [4, 0, 4])
    ([1, 2, 2], [2, 0, 2])
    """
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


def wanda_mask(
    matrix: Tensor, alive: Tensor, squares: Tensor, kept: int, pattern: Pattern, *, by_row: bool = True
) -> Tensor:
    """Return the mask of a matrix (outputs, inputs) by Wanda (Sun et al. 2023, arXiv 2306.11695).

    A weight scores |w| times the norm of its input, because w * x is what it adds to its output.

    Args:
        alive: which weights are live now; no others are chosen.
        squares: the sums of the squares of the inputs, (row groups, inputs). The rows form as many equal groups.
        kept: how many groups of the pattern are live in the end.
        by_row: rank each row on its own; otherwise all rows together.

    Examples:
        >>> from growprune.masks.patterns import Unstructured
        >>> w, ones = torch.tensor([[1.0, -2.0], [3.0, 4.0]]), torch.ones(2, 2, dtype=torch.bool)
        >>> wanda_mask(w, ones, torch.tensor([[9.0, 1.0]]), 2, Unstructured()).tolist()
        [[True, False], [True, False]]
    """
    norms = squares.sqrt().unsqueeze(1)
    scores = (matrix.abs().view(len(squares), -1, matrix.shape[1]) * norms).view(matrix.shape)
    return (chosen_by_row if by_row else chosen_in_all)(pattern, scores, alive, kept)
