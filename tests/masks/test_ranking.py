"""Exact top-k, against a sort in plain Python."""

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from growprune.masks.allocation import num_kept
from growprune.masks.ranking import KeyChunks, choose, kth_largest, magnitude_keys


def source(keys: Sequence[int], chunk: int = 3, dtype: torch.dtype = torch.int32) -> KeyChunks:
    """Keys handed out a few at a time."""

    def chunks() -> Iterator[Tensor]:
        for start in range(0, len(keys), chunk):
            yield torch.tensor(keys[start : start + chunk], dtype=dtype)

    return chunks


def chosen(lists: Sequence[Sequence[int]], k: int, *, chunk: int = 3, bits: int = 31) -> list[list[bool]]:
    dtype = torch.int64 if bits > 31 else torch.int32
    walks = choose([source(keys, chunk, dtype) for keys in lists], k, bits=bits)
    return [[bool(x) for piece in walk for x in piece] for walk in walks]


def sorted_choice(lists: Sequence[Sequence[int]], k: int) -> list[list[bool]]:
    """The reference: sort all by key, the largest first, the earlier first where they tie."""
    flat = [(-key, i, j) for i, keys in enumerate(lists) for j, key in enumerate(keys) if key > 0]
    best = {(i, j) for _, i, j in sorted(flat)[:k]}
    return [[(i, j) in best for j in range(len(keys))] for i, keys in enumerate(lists)]


# Few values make ties, many make none; zero may not be chosen; a list may be empty
few_keys = st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=4)
many_keys = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9), min_size=1, max_size=4)
wide_keys = st.lists(st.lists(st.integers(0, 2**63 - 1), max_size=9), min_size=1, max_size=4)


def some_k(data: st.DataObject, lists: Sequence[Sequence[int]]) -> int:
    return data.draw(st.integers(0, sum(key > 0 for keys in lists for key in keys)))


@given(few_keys | many_keys, st.integers(1, 10), st.data())
def test_the_k_largest_are_those_of_a_sort(lists: list[list[int]], chunk: int, data: st.DataObject) -> None:
    k = some_k(data, lists)
    assert chosen(lists, k, chunk=chunk) == sorted_choice(lists, k)


@given(few_keys | wide_keys, st.data())
def test_the_k_largest_of_63_bit_keys_are_those_of_a_sort(lists: list[list[int]], data: st.DataObject) -> None:
    k = some_k(data, lists)
    assert chosen(lists, k, bits=63) == sorted_choice(lists, k)


@given(few_keys | many_keys, st.data())
def test_the_threshold_is_the_kth_largest_key(lists: list[list[int]], data: st.DataObject) -> None:
    k = some_k(data, lists)
    if k:
        ranked = sorted((key for keys in lists for key in keys), reverse=True)
        threshold = ranked[k - 1]
        found = kth_largest([source(keys) for keys in lists], k)
        assert found == (threshold, ranked[:k].count(threshold), ranked.count(threshold))


def test_of_equal_keys_the_earlier_positions_are_chosen() -> None:
    assert chosen([[5, 5, 5], [5, 5, 5]], 4) == [[True, True, True], [True, False, False]]
    assert chosen([[1, 7, 1, 1, 7, 1, 1]], 4) == [[True, True, True, False, True, False, False]]


@pytest.mark.parametrize("lists", [[[0, 4, 0, 1]], [[]], [[4], [1]], [[0, 0, 0, 0]]])
def test_more_than_may_be_chosen_is_an_error(lists: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="cannot choose 3 positions: fewer are available"):
        chosen(lists, 3)


def test_the_largest_key_of_all_can_be_the_threshold() -> None:
    top = 2**31 - 1
    assert chosen([[top, 1, top, top - 1]], 3) == [[True, False, True, True]]


# Magnitudes

FLOATS = [0.0, 5e-324, 1e-310, 2.3e-308, 1e-45, 1e-40, 1.2e-38, 6e-8, 6.1e-5, 0.5, 0.50048828125, 1.0, 1.5, 65504.0]
"""In order, with the denormals of float64, float32 and float16 among them. Some round to the same in a short type."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_keys_sort_like_magnitudes_in_every_float_type(dtype: torch.dtype) -> None:
    values = torch.tensor(FLOATS, dtype=dtype)
    keys = magnitude_keys(values).tolist()
    assert keys == magnitude_keys(-values).tolist()
    assert keys == sorted(keys)
    pairs = list(zip(values.tolist(), keys, strict=True))
    for (a, key_a), (b, key_b) in itertools.pairwise(pairs):
        assert (key_a == key_b) == (a == b)


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1),
)
def test_keys_sort_like_magnitudes(short: list[float], long: list[float]) -> None:
    for numbers, dtype in ((short, torch.float32), (long, torch.float64)):
        keys = magnitude_keys(torch.tensor(numbers, dtype=dtype)).tolist()
        places = range(len(keys))
        assert sorted(places, key=keys.__getitem__) == sorted(
            places, key=[abs(number) for number in numbers].__getitem__
        )


def test_a_zero_of_either_sign_has_key_one_and_may_be_chosen() -> None:
    assert magnitude_keys(torch.tensor([0.0, -0.0])).tolist() == [1, 1]
    assert magnitude_keys(torch.tensor([0.0, -0.0], dtype=torch.float64)).tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_finite_key_fits_its_bits(dtype: torch.dtype) -> None:
    largest = magnitude_keys(torch.tensor([torch.finfo(dtype).max], dtype=dtype))
    assert int(largest) < 2 ** (63 if dtype == torch.float64 else 31) - 1


def test_views_have_the_keys_of_their_values() -> None:
    values = torch.arange(24.0).view(1, 2, 3, 4)
    expected = magnitude_keys(values)
    assert torch.equal(magnitude_keys(values.to(memory_format=torch.channels_last)), expected)
    assert torch.equal(magnitude_keys(values.transpose(1, 3)), expected.transpose(1, 3))


# Counts


@pytest.mark.parametrize(
    ("sparsity", "total", "kept"),
    [
        (0.8, 1000, 200),
        (0.9, 10, 1),
        (0.95, 10, 0),  # half of one, to the even
        (0.85, 10, 2),  # one and a half, to the even
        (0.75, 10, 2),  # two and a half, to the even
        (0.99, 150, 2),
        (0.5, 1, 0),
        (0.5, 3, 2),
        (0.7, 10, 3),  # in floats 1 - 0.7 is a little more than 0.3
        (0.3, 5, 4),
        (0.0, 7, 7),
        (0, 7, 7),
        (0.9, 0, 0),
        (1e-07, 10_000_000, 9_999_999),
        (0.9, 100_000_000_001, 10_000_000_000),
    ],
)
def test_number_of_kept_weights_is_rounded_half_to_even(sparsity: float, total: int, kept: int) -> None:
    assert num_kept(sparsity, total) == kept


def kept_of(keys: list[list[int]], k: int, least: list[int]) -> list[list[bool]]:
    sources = [lambda own=own: iter([torch.tensor(own)]) for own in keys]
    return [torch.cat(list(walk)).tolist() for walk in choose(sources, k, least=least)]


def test_choose_gives_each_source_its_least_and_the_others_share_the_rest() -> None:
    keys = [[9, 8, 7, 6], [1, 3, 3, 2], [5, 4, 4, 1]]
    assert kept_of(keys, 4, [0, 0, 0]) == [[True] * 4, [False] * 4, [False] * 4]
    # of four, two go to the second source, of which the first 3 wins the tie; the last place but one goes to 9
    assert kept_of(keys, 4, [0, 2, 0]) == [[True, True, False, False], [False, True, True, False], [False] * 4]
    # the second source takes a place of the others, so that the third falls below its least only then
    assert kept_of([[9, 8, 7], [1, 1], [6, 2]], 4, [0, 1, 1]) == [[True, True, False], [True, False], [True, False]]
    assert kept_of(keys, 3, [1, 1, 1]) == [[True] + [False] * 3, [False, True, False, False], [True] + [False] * 3]


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=8), min_size=1, max_size=5), st.data())
def test_choose_with_least_is_exact_and_the_best_there_is(keys: list[list[int]], data: st.DataObject) -> None:
    least = [data.draw(st.integers(0, len(own))) for own in keys]
    k = data.draw(st.integers(sum(least), sum(map(len, keys))))
    found = kept_of(keys, k, least)
    counts = [sum(own) for own in found]
    assert sum(counts) == k
    assert all(count >= few for count, few in zip(counts, least, strict=True))
    # take the least of each source, then the best of all others
    ordered = [sorted(own, reverse=True) for own in keys]
    best = [key for own, few in zip(ordered, least, strict=True) for key in own[:few]]
    rest = sorted((key for own, few in zip(ordered, least, strict=True) for key in own[few:]), reverse=True)
    best += rest[: k - len(best)]
    chosen = [
        key for own, kept in zip(keys, found, strict=True) for key, is_kept in zip(own, kept, strict=True) if is_kept
    ]
    assert sorted(chosen) == sorted(best)


def test_places_for_ties_are_handed_on_from_chunk_to_chunk() -> None:
    for chunk in range(1, 8):
        assert chosen([[2, 2, 2, 2, 2, 2, 2]], 5, chunk=chunk) == [[True] * 5 + [False] * 2]


def test_a_key_of_zero_is_never_chosen() -> None:
    assert chosen([[0, 4, 0, 1]], 2) == [[False, True, False, True]]
