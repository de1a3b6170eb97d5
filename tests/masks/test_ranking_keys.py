"""What edits rank by."""

import itertools
import math

import pytest
import torch
from few_weights import splitmix
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from growprune.masks.layers import Weight
from growprune.masks.patterns import parse_pattern
from growprune.masks.ranking import (
    check_finite,
    edit_keys,
    key_bits_of,
    magnitude_keys,
    random_keys,
    salt_of,
    signed_keys,
)
from growprune.plan import By, Edit, Part, grow, prune

CPU = torch.device("cpu")
PART = Part("S0", ("w",))


def keys_of(edit: Edit, values: Tensor, mask: Tensor, pattern: str = "unstructured") -> list[int]:
    weight = Weight("w", "w", tuple(values.shape))
    chunks = edit_keys(
        edit, weight, parse_pattern(pattern), read=lambda weight: (values, mask), salt=7, dtype=values.dtype
    )
    return torch.cat(list(chunks())).tolist()


@given(st.integers(0, 2**40), st.integers(0, 2**64 - 1))
def test_random_keys_are_splitmix64(start: int, salt: int) -> None:
    assert random_keys(start, 3, salt, CPU).tolist() == [splitmix(start + i, salt) for i in range(3)]


def test_random_keys_are_the_same_in_every_release() -> None:
    assert salt_of(0, 0, "w") == 5516202343204000186
    assert random_keys(0, 3, 1, CPU).tolist() == [363103624, 608340860, 800777065]


@given(st.integers(1, 50), st.integers(0, 2**64 - 1))
def test_random_keys_do_not_depend_on_chunks(cut: int, salt: int) -> None:
    whole = random_keys(0, 60, salt, CPU)
    assert torch.equal(torch.cat([random_keys(0, cut, salt, CPU), random_keys(cut, 60 - cut, salt, CPU)]), whole)


@pytest.mark.parametrize("salt", [0, 1, 2**63, salt_of("a"), salt_of("b")])
def test_random_keys_are_spread_evenly(salt: int) -> None:
    keys = random_keys(0, 1 << 16, salt, CPU)
    assert int(keys.min()) >= 1
    assert int(keys.max()) <= 1 << 30
    counts = torch.bincount((keys - 1) >> 26, minlength=16).double()  # 16 buckets of 4096 expected
    assert float(((counts - 4096) ** 2 / 4096).sum()) < 45  # chi-square, 15 degrees: once in 10,000


def test_neighbouring_positions_and_salts_are_unrelated() -> None:
    first, second = (random_keys(0, 1 << 14, salt, CPU).double() for salt in (1, 2))
    for a, b in ((first, second), (first[1:], first[:-1])):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.04  # five standard deviations


def test_a_salt_depends_on_all_it_is_given() -> None:
    salts = {salt_of(seed, number, name) for seed in (0, 1) for number in (0, 1) for name in ("a", "b")}
    assert len(salts) == 8
    assert salt_of(1, 11) != salt_of(11, 1)


def test_pruning_ranks_the_living_by_magnitude_and_never_takes_the_dead() -> None:
    values, mask = torch.tensor([[3.0, -5.0, 1.0, 0.0]]), torch.tensor([[True, True, False, True]])
    assert keys_of(prune(PART, to=0.5), values, mask) == [
        int(magnitude_keys(torch.tensor(3.0))),
        int(magnitude_keys(torch.tensor(5.0))),
        0,
        1,
    ]


def test_pruning_at_random_looks_at_no_value() -> None:
    mask = torch.tensor([[True, False, True, True]])
    values = torch.full((1, 4), math.nan)
    expected = [splitmix(0, 7), 0, splitmix(2, 7), splitmix(3, 7)]
    assert keys_of(prune(PART, to=0.5, by=By.RANDOM), values, mask) == expected


def test_growing_keeps_the_living_before_all_others() -> None:
    values, mask = torch.tensor([[3.0, 0.0, 1.0, 0.0]]), torch.tensor([[True, False, True, False]])
    always = (1 << 31) - 1
    assert keys_of(grow(PART, to=0.5), values, mask) == [always, splitmix(1, 7), always, splitmix(3, 7)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("by", [By.RANDOM, By.GRADIENT, By.MOMENTUM, By.SNIP, By.GRASP])
def test_what_lives_ranks_above_all_that_could_grow(by: By, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = torch.tensor([[0.0, largest, -largest, 0.0]], dtype=dtype)
    living, *others = keys_of(grow(PART, to=0.5, by=by), values, torch.tensor([[True, False, False, False]]))
    assert living > max(others)
    assert min(others) >= 1
    assert living < 1 << key_bits_of(grow(PART, to=0.5, by=by), dtype)


def test_growing_by_gradient_ranks_the_dead_by_its_magnitude() -> None:
    gradient, mask = torch.tensor([[3.0, -5.0, 1.0, 0.0]]), torch.tensor([[True, False, False, False]])
    edit = grow(PART, to=0.5, by=By.GRADIENT)
    assert keys_of(edit, gradient, mask) == [(1 << 31) - 1, *magnitude_keys(gradient[0, 1:]).tolist()]
    wide = keys_of(edit, gradient.double(), mask)
    assert wide == [(1 << 63) - 1, *magnitude_keys(gradient[0, 1:].double()).tolist()]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=8))
def test_signed_keys_sort_like_the_scores(scores: list[float]) -> None:
    keys = signed_keys(torch.tensor(scores, dtype=torch.float64)).tolist()
    assert all(1 <= key < 1 << 63 for key in keys)
    for (a, key_a), (b, key_b) in itertools.combinations(zip(scores, keys, strict=True), 2):
        assert key_a == key_b or (key_a < key_b) is (a < b)
        assert (
            a == b or key_a != key_b or math.nextafter(a, b) == b or math.isclose(a, b, rel_tol=1e-15, abs_tol=1e-322)
        )


def test_a_negative_score_ranks_below_zero_and_zero_below_a_positive_one() -> None:
    values, mask = torch.tensor([[0.5, -2.0, 0.0, -1.0]]), torch.ones(1, 4, dtype=torch.bool)
    keys = keys_of(prune(PART, to=0.5, by=By.GRASP), values, mask)
    assert [keys.index(key) for key in sorted(keys)] == [1, 3, 2, 0]


def test_blocks_of_signed_scores_are_ranked_by_their_sums() -> None:
    values, mask = torch.tensor([[5.0, -9.0, 1.0, 2.0, -1.0, 0.5]]), torch.ones(1, 6, dtype=torch.bool)
    keys = keys_of(prune(PART, to=0.5, by=By.GRASP), values, mask, "1x2")
    assert keys == signed_keys(torch.tensor([-4.0, 3.0, -0.5])).tolist()


def test_of_four_signed_scores_the_two_largest_may_live() -> None:
    values, mask = torch.tensor([[-3.0, 1.0, -1.0, -2.0]]), torch.ones(1, 4, dtype=torch.bool)
    keys = keys_of(prune(PART, to=0.5, by=By.GRASP), values, mask, "2:4")
    assert [key > 0 for key in keys] == [False, True, True, False]


def test_blocks_are_ranked_by_their_sums_and_die_together() -> None:
    values, mask = torch.tensor([[3.0, -5.0, 1.0, 0.5]]), torch.tensor([[True, True, False, False]])
    assert keys_of(prune(PART, to=0.5), values, mask, "1x2") == [int(magnitude_keys(torch.tensor(8.0))), 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_an_error_that_names_the_weight(dtype: torch.dtype, bad: float) -> None:
    values = torch.tensor([[1.0, 2.0, bad, 3.0]], dtype=dtype)
    with pytest.raises(ValueError, match=r"^w has NaN or infinity"):
        check_finite(values, Weight("w", "w", (1, 4)))


def test_a_nan_as_cuda_writes_it_is_told_too() -> None:
    for bits in (torch.tensor([2**31 - 1, 0], dtype=torch.int32), torch.tensor([-1, 0], dtype=torch.int32)):
        with pytest.raises(ValueError, match="has NaN or infinity"):
            check_finite(bits.view(torch.float32), Weight("w", "w", (2,)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_largest_numbers_are_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    check_finite(torch.tensor([largest, -largest], dtype=dtype), Weight("w", "w", (2,)))
    check_finite(torch.empty(0, dtype=dtype), Weight("w", "w", (0,)))
