"""How sparsity is shared among layers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growprune.masks.allocation import ALLOCATIONS, Pool, erk, erk_counts, global_, num_kept, parse_allocation, uniform
from growprune.masks.layers import Weight
from growprune.masks.patterns import parse_pattern

SMALL, LARGE, CONV = (
    Weight("small", "small", (10, 10)),
    Weight("large", "large", (100, 100)),
    Weight("conv", "conv", (4, 2, 3, 3)),
)
FREE = parse_pattern("unstructured")


def test_uniform_gives_every_layer_the_same_sparsity() -> None:
    pools = uniform([SMALL, LARGE, CONV], [SMALL, CONV], 0.9, FREE)
    assert pools == [Pool((SMALL,), 10), Pool((CONV,), 7)]


def test_uniform_counts_blocks() -> None:
    assert uniform([SMALL], [SMALL], 0.5, parse_pattern("1x8")) == [Pool((SMALL,), 10)]  # 10 rows of 2


def test_global_ranks_the_whole_model_together() -> None:
    assert global_([SMALL, LARGE], [SMALL], 0.9, FREE) == [Pool((SMALL, LARGE), 1010, least=(0, 30))]


@pytest.mark.parametrize(
    ("shapes", "sizes", "sparsity", "counts"),
    [
        # (10 + 10) / 100 = 0.2 and (100 + 100) / 10000 = 0.02; epsilon = 1010 / (0.2 * 100 + 0.02 * 10000) = 4.5909...
        # so 4.59 * 20 = 91.8 and 4.59 * 200 = 918.2 weights; the missing one goes to the larger remainder
        ([(10, 10), (100, 100)], [100, 10_000], 0.9, [92, 918]),
        # epsilon = 52 / (1 * 4 + 0.2 * 100) = 2.17 is more than all of the first: it is dense, 48 are left
        ([(2, 2), (10, 10)], [4, 100], 0.5, [4, 48]),
        # the kernel counts: (4 + 2 + 3 + 3) / 72 = 1/6 and (6 + 6) / 36 = 1/3; epsilon = 54 / (12 + 12) = 2.25: 27 each
        ([(4, 2, 3, 3), (6, 6)], [72, 36], 0.5, [27, 27]),
    ],
)
def test_erk_by_hand(shapes: list[tuple[int, ...]], sizes: list[int], sparsity: float, counts: list[int]) -> None:
    assert erk_counts(shapes, sizes, sparsity) == counts


def test_erk_of_parts_adds_up_to_the_whole() -> None:
    (small,) = erk([SMALL, LARGE], [SMALL], 0.9, FREE)
    (large,) = erk([SMALL, LARGE], [LARGE], 0.9, FREE)
    assert (small, large) == (Pool((SMALL,), 92), Pool((LARGE,), 918))


def test_erk_gives_no_layer_more_than_its_pattern_allows() -> None:
    narrow, wide = Weight("narrow", "narrow", (4, 4)), Weight("wide", "wide", (40, 40))
    pools = erk([narrow, wide], [narrow, wide], 0.8, parse_pattern("2:4"))
    assert pools == [Pool((narrow,), 8), Pool((wide,), num_kept(0.8, 1616) - 8)]


shapes = st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4).map(tuple), min_size=1, max_size=6)
sparsities = st.sampled_from([0.0, 0.1, 0.5, 0.75, 0.8, 0.9, 0.95, 0.99])


@given(shapes, sparsities)
def test_erk_counts_add_up_exactly_and_fit_their_layers(shapes: list[tuple[int, ...]], sparsity: float) -> None:
    weights = [Weight(str(i), str(i), shape) for i, shape in enumerate(shapes)]
    sizes = [weight.numel for weight in weights]
    counts = erk_counts(shapes, sizes, sparsity)
    assert sum(counts) == num_kept(sparsity, sum(sizes))
    assert all(0 <= count <= size for count, size in zip(counts, sizes, strict=True))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=6), st.integers(1, 4), st.data())
def test_erk_counts_add_up_exactly_under_n_of_m(dims: list[tuple[int, int]], n: int, data: st.DataObject) -> None:
    shapes = [(rows, 4 * windows) for rows, windows in dims]
    sizes = [rows * columns for rows, columns in shapes]
    most = [size // 4 * n for size in sizes]
    sparsity = data.draw(st.sampled_from([s for s in (0.0, 0.25, 0.5, 0.75, 0.8, 0.9) if s >= 1 - n / 4]))
    counts = erk_counts(shapes, sizes, sparsity, most=most)
    assert sum(counts) == num_kept(sparsity, sum(sizes))
    assert all(0 <= count <= top for count, top in zip(counts, most, strict=True))


@pytest.mark.parametrize("name", list(ALLOCATIONS))
@pytest.mark.parametrize("pattern", ["unstructured", "1x8", "4x4"])
def test_every_allocation_keeps_the_asked_share_of_all_groups(name: str, pattern: str) -> None:
    model, parsed = [SMALL, LARGE], parse_pattern(pattern)
    pools = parse_allocation(name)(model, model, 0.9, parsed)
    total = sum(parsed.num_groups(weight) for weight in model)
    assert abs(sum(pool.kept for pool in pools) - 0.1 * total) <= len(model) / 2


def test_an_unknown_allocation_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"allocation must be one of uniform, .*, got 'gobal'"):
        parse_allocation("gobal")
