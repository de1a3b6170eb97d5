"""Wanda and SparseGPT on matrices of a few numbers, against values by hand and closed-form solutions."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from growprune.masks.patterns import Unstructured, parse_pattern
from growprune.sparse.layer_choice import (
    chosen_by_row,
    chosen_in_all,
    group_keys,
    inverse_factor,
    keep_best,
    num_choosable,
    shares,
    sparsegpt_pruned,
    wanda_scores,
)


def full(matrix: Tensor) -> Tensor:
    return torch.ones_like(matrix, dtype=torch.bool)


@given(st.lists(st.integers(0, 9), max_size=8), st.data())
def test_any_total_that_fits_is_shared_out(room: list[int], data: st.DataObject) -> None:
    total = data.draw(st.integers(0, sum(room)))
    found = shares(total, room)
    assert sum(found) == total
    assert all(0 <= share <= most for share, most in zip(found, room, strict=True))


# Wanda


@pytest.mark.parametrize(
    ("matrix", "squares", "kept", "pattern", "choose", "expected"),
    [
        # norms 4, 1, 2, 0.5: scores 4 2 6 2 and 32 0.5 2 0.125
        ([[1, -2, 3, 4], [-8, 0.5, 1, 0.25]], [[16, 1, 4, 0.25]], 4, "unstructured", chosen_by_row, [[1, 0, 1, 0]] * 2),
        # scores 2 2, 16 7
        ([[1, -2], [8, 7]], [[4, 1]], 2, "unstructured", chosen_by_row, [[1, 0], [1, 0]]),
        ([[1, -2], [8, 7]], [[4, 1]], 2, "unstructured", chosen_in_all, [[0, 0], [1, 1]]),
        # each group of rows has the norms of its own inputs
        ([[2, 3], [2, 3]], [[4, 1], [1, 4]], 2, "unstructured", chosen_by_row, [[1, 0], [0, 1]]),
        # scores 0.5 4 3 10: two of four by score, and blocks by the sum of scores
        ([[5, 4, 3, 1]], [[0.01, 1, 1, 100]], 2, "2:4", chosen_by_row, [[0, 1, 0, 1]]),
        ([[5, 4, 3, 1]], [[0.01, 1, 1, 100]], 1, "1x2", chosen_by_row, [[0, 0, 1, 1]]),
    ],
)
def test_wanda_ranks_weights_times_the_norms_of_their_inputs(
    matrix: Any, squares: Any, kept: int, pattern: str, choose: Any, expected: list[list[int]]
) -> None:
    weights, inputs = torch.tensor(matrix, dtype=torch.float32), torch.tensor(squares, dtype=torch.float32)
    mask = choose(parse_pattern(pattern), wanda_scores(weights, inputs), full(weights), kept)
    assert mask.int().tolist() == expected


def test_wanda_chooses_no_weight_that_is_dead() -> None:
    matrix, alive = torch.tensor([[9.0, 1.0, 2.0]]), torch.tensor([[False, True, True]])
    mask = chosen_by_row(Unstructured(), wanda_scores(matrix, torch.ones(1, 3)), alive, 1)
    assert mask.int().tolist() == [[0, 0, 1]]


# SparseGPT


def correlated(columns: int, seed: int = 0) -> Tensor:
    """X^T X of inputs that depend on each other, with the usual dampening."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4 * columns, columns, generator=generator, dtype=torch.float64)
    inputs = inputs @ torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    products = inputs.T @ inputs
    return products + 0.01 * products.diagonal().mean() * torch.eye(columns, dtype=torch.float64)


def best_of_mask(row: Tensor, mask: Tensor, products: Tensor) -> Tensor:
    """The row with zeros off a mask whose outputs are nearest: the closed-form solution of masked least squares."""
    best = torch.zeros_like(row)
    best[mask] = torch.linalg.solve(products[mask][:, mask], (products @ row)[mask])
    return best


def test_inverse_factor_is_the_cholesky_factor_of_the_inverse() -> None:
    products = correlated(6)
    factor, dampening = inverse_factor(products[None], dampening=0.0)
    assert dampening == 0
    assert torch.equal(factor[0], factor[0].triu())
    torch.testing.assert_close(factor[0].T @ factor[0], products.inverse())


def test_sparsegpt_by_hand_on_two_numbers() -> None:
    # H = [[2, 1], [1, 2]], H^-1 = [[2, -1], [-1, 2]] / 3. To drop w0 = 1 costs 1 / (2/3) = 1.5, w1 = 3 (as the last,
    # with nothing after it) 9 * 2 = 18: w0 goes, and w1 takes on -1 / (2/3) * (-1/3) = 1/2
    factor, _ = inverse_factor(torch.tensor([[[2.0, 1.0], [1.0, 2.0]]]), dampening=0.0)
    mask, values = sparsegpt_pruned(torch.tensor([[1.0, 3.0]]), full(torch.ones(1, 2)), factor, 1, Unstructured())
    assert mask.tolist() == [[False, True]]
    torch.testing.assert_close(values * mask, torch.tensor([[0.0, 3.5]]))


@pytest.mark.parametrize("num_zeros", [1, 3, 5, 7])
def test_sparsegpt_solves_masked_least_squares_where_all_zeros_come_first(num_zeros: int) -> None:
    # every column that stays is still free when the last zero is made, so column by column is as good as all at once
    products = correlated(8)
    row = torch.tensor([[0.1, -0.1, 0.1, 0.1, -0.1, 0.1, 0.1, 5.0]], dtype=torch.float64)
    row[:, num_zeros:] += 50
    factor, _ = inverse_factor(products[None], dampening=0.0)
    mask, values = sparsegpt_pruned(row, full(row), factor, 8 - num_zeros, Unstructured())
    assert mask[0].tolist() == [False] * num_zeros + [True] * (8 - num_zeros)
    torch.testing.assert_close((values * mask)[0], best_of_mask(row[0], mask[0], products))


def test_sparsegpt_without_correlations_is_wanda() -> None:
    torch.manual_seed(0)
    matrix, squares = torch.randn(4, 8), torch.rand(8) + 0.1
    factor, _ = inverse_factor(squares.diag()[None], dampening=0.0)
    mask, values = sparsegpt_pruned(matrix, full(matrix), factor, 16, Unstructured())
    assert torch.equal(mask, chosen_in_all(Unstructured(), wanda_scores(matrix, squares[None]), full(matrix), 16))
    assert torch.equal(values[mask], matrix[mask])


def test_sparsegpt_in_many_blocks_of_columns_is_sparsegpt_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    products, matrix = correlated(40), torch.randn(6, 40, dtype=torch.float64)
    factor, _ = inverse_factor(products[None])
    mask, values = sparsegpt_pruned(matrix, full(matrix), factor, 120, parse_pattern("2:4"))
    monkeypatch.setattr("growprune.sparse.layer_choice.COLUMNS", 8)  # what follows is brought up to date more often
    again, same = sparsegpt_pruned(matrix, full(matrix), factor, 120, parse_pattern("2:4"))
    assert torch.equal(mask, again)
    torch.testing.assert_close(values * mask, same * mask)


def unequal(seed: int) -> tuple[Tensor, Tensor]:
    """A matrix (24, 32), and inputs of unequal size that are correlated."""
    torch.manual_seed(seed)
    return torch.randn(24, 32), torch.randn(256, 32) @ (torch.randn(32, 32) * torch.linspace(0.05, 2, 32))


def test_a_layer_of_up_to_128_inputs_is_pruned_as_in_the_paper() -> None:
    matrix, inputs = unequal(0)
    # the paper's algorithm in one block: H^-1 = U^T U, all costs (w / U_jj)^2 at once, then column by column
    hessian = (inputs.T @ inputs).double()
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(32)
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    want = matrix.double()
    costs = (want / upper.diagonal()) ** 2
    dead = costs <= costs.flatten().kthvalue(384).values
    for j in range(32):
        error = want[:, j] * dead[:, j] / upper[j, j]
        want[:, j:] -= error[:, None] * upper[j, j:]
    mask, values = sparsegpt_pruned(
        matrix, full(matrix), inverse_factor((inputs.T @ inputs)[None])[0], 384, Unstructured()
    )
    assert torch.equal(mask, ~dead)
    torch.testing.assert_close(values * mask, (want * ~dead).float(), rtol=1e-3, atol=1e-3)


def test_sparsegpt_errs_less_than_wanda_where_inputs_differ_in_size() -> None:
    better = 0
    for seed in range(10):
        matrix, inputs = unequal(seed)
        products = (inputs.T @ inputs)[None]
        mask, values = sparsegpt_pruned(matrix, full(matrix), inverse_factor(products)[0], 384, Unstructured())
        scores = wanda_scores(matrix, products.diagonal(dim1=1, dim2=2))
        by_wanda = chosen_by_row(Unstructured(), scores, full(matrix), 384)
        errors = [float((inputs @ (w - matrix).T).square().sum()) for w in (values * mask, matrix * by_wanda)]
        better += errors[0] < errors[1]
    assert better >= 9


def test_blocks_of_columns_share_by_the_costs_of_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("growprune.sparse.layer_choice.COLUMNS", 2)
    matrix = torch.tensor([[1.0, 5.0, 1.0, 1.0], [1.0, 6.0, 7.0, 1.0]])
    products = torch.eye(4)[None]  # no correlations: costs are magnitudes
    mask, _ = sparsegpt_pruned(matrix, full(matrix), inverse_factor(products)[0], 3, Unstructured())
    assert mask.int().tolist() == [[0, 1, 0, 0], [0, 1, 1, 0]]


def test_each_group_of_rows_has_a_hessian_of_its_own() -> None:
    torch.manual_seed(0)
    matrix, both = torch.randn(4, 8, dtype=torch.float64), torch.stack([correlated(8), correlated(8, seed=3)])
    alive = torch.rand(4, 8) < 0.5  # masks as they are, so that groups do not share a ranking
    pattern, factor = Unstructured(), inverse_factor(both)[0]
    _, together = sparsegpt_pruned(matrix, alive, factor, int(alive.sum()), pattern)
    for i in range(2):
        rows = slice(2 * i, 2 * i + 2)
        _, apart = sparsegpt_pruned(matrix[rows], alive[rows], factor[i : i + 1], int(alive[rows].sum()), pattern)
        torch.testing.assert_close(together[rows], apart)


@pytest.mark.parametrize("sparsity", [0.5, 0.75, 0.9])
@pytest.mark.parametrize("name", ["unstructured", "2:4", "1:4", "1x8", "4x1", "3x5"])
def test_sparsegpt_keeps_exactly_as_many_groups_as_asked(name: str, sparsity: float) -> None:
    torch.manual_seed(0)
    pattern, matrix = parse_pattern(name), torch.randn(10, 160)
    kept = int(sum(num_choosable(group_keys(pattern, torch.ones_like(matrix), full(matrix)))) * (1 - sparsity) * 2)
    factor, _ = inverse_factor(correlated(160).float()[None])
    mask, values = sparsegpt_pruned(matrix, full(matrix), factor, kept, pattern)
    keys = group_keys(pattern, mask.float(), mask)
    assert torch.equal(pattern.expand((keys > 1).flatten(), *matrix.shape), mask)  # whole groups
    assert int((keys > 1).sum()) == kept
    assert values.isfinite().all()


def test_two_of_four_is_chosen_when_its_columns_are_reached() -> None:
    # column 4 makes up for column 0 and so outgrows column 5, which a choice made beforehand would not know
    products = torch.eye(8, dtype=torch.float64)
    products[0, 4] = products[4, 0] = 0.9
    row = torch.tensor([[1.0, 9.0, 9.0, 0.1, 0.5, 1.0, 9.0, 0.1]], dtype=torch.float64)
    factor, _ = inverse_factor(products[None], dampening=0.0)
    mask, values = sparsegpt_pruned(row, full(row), factor, 4, parse_pattern("2:4"))
    assert mask[0].int().tolist() == [0, 1, 1, 0, 1, 0, 1, 0]
    assert values[0, 4].item() == pytest.approx(0.5 + 0.9)


def test_sparsegpt_lets_dead_weights_be_and_makes_up_for_what_they_would_take_on() -> None:
    products = correlated(6)
    row = torch.tensor([[0.1, 0.0, 5.0, 6.0, 7.0, 8.0]], dtype=torch.float64)
    alive = torch.tensor([[True, False, True, True, True, True]])
    factor, _ = inverse_factor(products[None], dampening=0.0)
    mask, values = sparsegpt_pruned(row, alive, factor, 4, Unstructured())
    assert mask[0].int().tolist() == [0, 0, 1, 1, 1, 1]
    torch.testing.assert_close((values * mask)[0], best_of_mask(row[0], mask[0], products))


def test_a_hessian_that_cannot_be_inverted_is_dampened_more() -> None:
    products = torch.tensor([[[1.0, -1.05], [-1.05, 1.0]]])  # no sum of products, but what rounding may make of one
    factor, dampening = inverse_factor(products)
    assert dampening == pytest.approx(0.1)
    torch.testing.assert_close(factor[0].T @ factor[0], torch.tensor([[1.1, -1.05], [-1.05, 1.1]]).inverse())


@pytest.mark.parametrize("scale", [2.0**63, 2.0**-40])
def test_huge_and_tiny_inputs_are_pruned_as_others(scale: float) -> None:
    # the sum of a diagonal near 3e38 overflows, and no dampening would make such a matrix one that can be inverted
    products = correlated(8).float()
    products *= 3.9 / products.max()
    factor, dampening = inverse_factor(products[None])
    scaled, same = inverse_factor(products[None] * scale * scale)
    assert dampening == same == 0.01
    assert torch.equal(scaled * scale, factor)


def test_inputs_that_are_all_zero_leave_magnitudes() -> None:
    factor, dampening = inverse_factor(torch.zeros(1, 4, 4))
    assert dampening == 0.01
    matrix = torch.tensor([[3.0, -1.0, 2.0, -4.0]])
    mask, values = sparsegpt_pruned(matrix, full(matrix), factor, 2, Unstructured())
    assert (mask.int().tolist(), values[mask].tolist()) == ([[1, 0, 0, 1]], [3.0, -4.0])


def test_of_equal_scores_the_earlier_are_kept() -> None:
    assert keep_best(torch.ones(2, 4, dtype=torch.int32), [3, 1]).int().tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
