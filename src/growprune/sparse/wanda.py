"""Wanda (Sun et al. 2023, arXiv 2306.11695): score each weight by |w| times the norm of its input.

A weight adds w * x to its output, so a medium weight on a large input matters more than a larger one on a small input.
Each output row is ranked on its own and keeps the same number. Weights that stay are not changed.
"""

from __future__ import annotations

from torch import Tensor

from growprune.masks.patterns import Pattern
from growprune.sparse.group_choice import chosen_by_row, chosen_in_all


def wanda_mask(
    matrix: Tensor, alive: Tensor, squares: Tensor, kept: int, pattern: Pattern, *, by_row: bool = True
) -> Tensor:
    """Return the mask of a matrix (outputs, inputs).

    Args:
        alive: which weights are live now; no others are chosen.
        squares: the sums of the squares of the inputs, (row groups, inputs). The rows form as many equal groups.
        kept: how many groups of the pattern are live in the end.
        by_row: rank each row on its own; otherwise all rows together.

    Examples:
        >>> import torch
        >>> from growprune.masks.patterns import Unstructured
        >>> w, ones = torch.tensor([[1.0, -2.0], [3.0, 4.0]]), torch.ones(2, 2, dtype=torch.bool)
        >>> wanda_mask(w, ones, torch.tensor([[9.0, 1.0]]), 2, Unstructured()).tolist()
        [[True, False], [True, False]]
    """
    norms = squares.sqrt().unsqueeze(1)
    scores = (matrix.abs().view(len(squares), -1, matrix.shape[1]) * norms).view(matrix.shape)
    return (chosen_by_row if by_row else chosen_in_all)(pattern, scores, alive, kept)
