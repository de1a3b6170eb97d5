"""Patterns, against masks written out by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.masks import patterns
from growprune.masks.layers import Weight
from growprune.masks.patterns import (
    Block,
    NofM,
    Unstructured,
    count_groups,
    matrix_shape,
    parse_pattern,
    walk_groups,
    write_groups,
)
from growprune.masks.ranking import choose, edit_keys, key_bits_of
from growprune.plan import Part, prune


def weight_like(values: Tensor, *, transposed: bool = False) -> Weight:
    return Weight("w", "w", tuple(values.shape), transposed=transposed)


def kept(pattern: str, values: Tensor, k: int, *, transposed: bool = False) -> Tensor:
    """The mask of the best k groups."""
    weight, parsed = weight_like(values, transposed=transposed), parse_pattern(pattern)
    mask = torch.ones_like(values, dtype=torch.bool)
    edit = prune(Part("S0", ("w",)), to=0.5)
    keys = edit_keys(edit, weight, parsed, read=lambda weight: (values, mask), salt=0, dtype=values.dtype)
    (walk,) = choose([keys], k, bits=key_bits_of(edit, values.dtype))
    write_groups(parsed, mask, weight, walk)
    return mask


def as_rows(mask: Tensor) -> list[str]:
    """A mask as text: x lives."""
    return ["".join("x" if alive else "." for alive in row) for row in mask.flatten(1).tolist()]


# Unstructured


OVERHANGING = [[1, 1, 1, 1, 3], [1, 1, 1, 1, 3], [1, 1, 2, 2, 5]]  # sums 4 4 6 / 2 4 5


@pytest.mark.parametrize(
    ("pattern", "values", "k", "rows"),
    [
        ("unstructured", [[1, -4, 2], [0, 3, -5]], 3, [".x.", ".xx"]),
        ("unstructured", [[1] * 4] * 2, 5, ["xxxx", "x..."]),  # ties go by flat index
        ("unstructured", [[0] * 4] * 2, 3, ["xxx.", "...."]),
        # a 1x4 block lives or dies as a whole by the sum of its magnitudes, here 9 12 / 4 8
        ("1x4", [[9, 0, 0, 0, -3, 3, -3, 3], [1, 1, 1, 1, 2, 2, 2, 2]], 1, ["....xxxx", "........"]),
        ("1x4", [[9, 0, 0, 0, -3, 3, -3, 3], [1, 1, 1, 1, 2, 2, 2, 2]], 2, ["xxxxxxxx", "........"]),
        ("1x4", [[9, 0, 0, 0, -3, 3, -3, 3], [1, 1, 1, 1, 2, 2, 2, 2]], 3, ["xxxxxxxx", "....xxxx"]),
        # a 2x2 block spans two outputs and two inputs; sums 4 5 / 3 8
        ("2x2", [[1, 1, 0, 5], [1, 1, 0, 0], [3, 0, 2, 2], [0, 0, 2, 2]], 2, ["..xx", "..xx", "..xx", "..xx"]),
        ("2x2", [[1, 1, 0, 5], [1, 1, 0, 0], [3, 0, 2, 2], [0, 0, 2, 2]], 3, ["xxxx", "xxxx", "..xx", "..xx"]),
        # what overhangs an edge counts as zeros there
        ("2x2", OVERHANGING, 1, ["....x", "....x", "....."]),
        ("2x2", OVERHANGING, 2, ["....x", "....x", "....x"]),
        ("2x2", OVERHANGING, 3, ["xx..x", "xx..x", "....x"]),
        ("2x2", OVERHANGING, 5, ["xxxxx", "xxxxx", "..xxx"]),
        ("4x8", [[1] * 3] * 2, 1, ["xxx", "xxx"]),  # larger than the weight: it is the weight
        ("1x2", [[1] * 4] * 2, 3, ["xxxx", "xx.."]),  # equal blocks are taken in order
        ("2:4", [[4, -3, 2, 1, 1, 2, -3, 4], [9, 9, 9, 9, 0, 1, 0, 0]], 8, ["xx....xx", "xx..xx.."]),
        ("2:4", [[9, 8, 7, 6, 1, 2, 3, 4]], 3, ["xx.....x"]),  # below a half, the best that the pattern allows
    ],
)
def test_the_groups_of_the_largest_magnitudes_live(
    pattern: str, values: list[list[float]], k: int, rows: list[str]
) -> None:
    assert as_rows(kept(pattern, torch.tensor(values, dtype=torch.float32), k)) == rows


def test_ties_go_by_logical_position_whatever_the_memory_layout() -> None:
    values = torch.ones(2, 3, 1, 2)
    expected = kept("unstructured", values, 7)
    assert as_rows(expected) == ["xxxxxx", "x....."]
    assert torch.equal(kept("unstructured", values.to(memory_format=torch.channels_last), 7), expected)
    assert as_rows(kept("unstructured", torch.ones(4, 2).T, 5)) == ["xxxx", "x..."]


def test_unstructured_works_on_a_vector() -> None:
    assert kept("unstructured", torch.tensor([1.0, 3.0, -2.0]), 2).tolist() == [False, True, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_unstructured_works_in_every_float_type(dtype: torch.dtype) -> None:
    assert as_rows(kept("unstructured", torch.tensor([[1.0, -4.0, 2.0, 0.5]], dtype=dtype), 2)) == [".xx."]


# Blocks


def test_a_1x8_block_of_a_convolution_is_one_kernel_position_of_eight_channels() -> None:
    values = torch.ones(2, 16, 2, 2)
    values[1, 8:, 0, 1] = 3.0
    values[0, :8, 1, 0] = -2.0
    mask = kept("1x8", values, 2)
    assert mask.sum() == 16
    assert mask[1, 8:, 0, 1].all()
    assert mask[0, :8, 1, 0].all()


def test_a_block_may_run_over_into_the_next_kernel_position() -> None:
    values = torch.arange(6.0).view(1, 3, 1, 2)  # folded: 0 2 4 | 1 3 5
    mask = kept("1x2", values, 1)  # sums 2, 5, 8
    assert mask[0, :, 0, 1].tolist() == [False, True, True]
    assert mask.sum() == 2


def test_the_rows_of_a_transposed_convolution_are_its_outputs() -> None:
    values = torch.tensor([[1.0, 5.0], [1.0, 0.0]])[..., None]  # (in, out, k): outputs have sums 2 and 5
    assert kept("1x2", values, 1, transposed=True)[..., 0].tolist() == [[False, True], [False, True]]
    assert kept("1x2", values, 1)[..., 0].tolist() == [[True, True], [False, False]]


def test_the_matrix_of_a_transposed_convolution_has_its_outputs_as_rows() -> None:
    assert matrix_shape(Weight("w", "w", (4, 6, 3, 3), transposed=True)) == (6, 36)
    assert matrix_shape(Weight("w", "w", (4, 6, 3, 3))) == (4, 54)
    assert matrix_shape(Weight("w", "w", (5,))) == (5, 1)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 7), (3, 5), (8, 1), (64, 64)])
def test_a_block_is_scored_by_the_sum_of_all_its_magnitudes(height: int, width: int) -> None:
    matrix = (torch.arange(4 * height * width) % 11 + 1.0).view(2 * height, 2 * width)  # so small that sums are exact
    matrix[::2] *= -1
    expected = matrix.abs().view(2, height, 2, width).sum((1, 3))
    pattern = parse_pattern(f"{height}x{width}")
    assert pattern.score(matrix).tolist() == expected.flatten().tolist()
    assert matrix[0, 0] == -1  # the weights themselves are left as they are


def test_block_sums_of_half_precision_are_made_in_float32() -> None:
    values = torch.tensor([[2048.0, 1.0, 2048.0, 0.0]], dtype=torch.float16)  # in float16, 2048 + 1 = 2048
    assert as_rows(kept("1x2", values.flip(1), 1)) == ["..xx"]


# N:M


def test_1_of_4_on_a_convolution_runs_along_the_inputs() -> None:
    values = torch.zeros(1, 4, 1, 2)
    values[0, 2, 0, 0], values[0, 1, 0, 1] = 1.0, 1.0
    mask = kept("1:4", values, 2)
    assert mask[0, :, 0, 0].tolist() == [False, False, True, False]
    assert mask[0, :, 0, 1].tolist() == [False, True, False, False]


def test_n_of_m_refuses_inputs_that_are_no_multiple() -> None:
    with pytest.raises(ValueError, match="pattern 2:4 needs a multiple of 4 inputs, but w has 6: add it to keep_dense"):
        NofM(n=2, m=4).check(Weight("w", "w", (4, 6)), 0.5)


@pytest.mark.parametrize(("pattern", "sparsity"), [("2:4", 0.49), ("1:4", 0.5), ("1:4", 0.7), ("7:10", 0.29)])
def test_n_of_m_refuses_a_sparsity_it_cannot_have(pattern: str, sparsity: float) -> None:
    with pytest.raises(ValueError, match=rf"sparsity must be >= .* for pattern {pattern} .*got {sparsity}"):
        parse_pattern(pattern).check(Weight("w", "w", (4, 20)), sparsity)


@pytest.mark.parametrize(
    ("pattern", "sparsity"), [("2:4", 0), ("2:4", 0.5), ("1:4", 0.75), ("7:10", 0.3), ("1:5", 0.8)]
)
def test_n_of_m_takes_its_own_sparsity_and_dense(pattern: str, sparsity: float) -> None:
    parse_pattern(pattern).check(Weight("w", "w", (4, 20)), sparsity)


def test_at_most_n_of_m_can_live() -> None:
    weight = Weight("w", "w", (4, 8))
    assert NofM(n=2, m=4).most_alive(weight) == 16
    assert Unstructured().most_alive(weight) == 32
    assert Block(height=2, width=8).most_alive(weight) == 2


# All of them


def test_only_blocks_share_a_bit() -> None:
    assert parse_pattern("3x2").bit_pattern == Block(height=3, width=2)
    for text in ("unstructured", "2:4"):
        assert parse_pattern(text).bit_pattern == Unstructured()


@pytest.mark.parametrize(
    ("text", "shape", "transposed", "length"),
    [
        ("1x4", (3, 8), False, 4),
        ("1x4", (3, 8, 5, 5), False, 4),
        ("1x4", (3, 6), False, 1),  # a block would run over into the next row or kernel position
        ("1x4", (8, 8, 3), True, 1),  # its inputs are not last
        ("1x4", (8,), False, 1),
        ("2x4", (4, 8), False, 1),
        ("2:4", (4, 8), False, 1),
        ("unstructured", (4, 8), False, 1),
    ],
)
def test_blocks_one_row_high_that_fit_the_inputs_are_runs(
    text: str, shape: tuple[int, ...], transposed: bool, length: int
) -> None:
    assert parse_pattern(text).run_length(shape, transposed=transposed) == length


@pytest.mark.parametrize("text", ["unstructured", "1x1", "1x8", "16x4", "2:4", "1:2", "4:4"])
def test_a_pattern_has_the_name_it_is_written_with(text: str) -> None:
    assert parse_pattern(text).name == text
    assert parse_pattern(parse_pattern(text)) == parse_pattern(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "free",
        "Unstructured",
        "0x8",
        "1x0",
        "8",
        "x8",
        "1x8x2",
        "3:2",
        "0:4",
        "2:",
        "-1x8",
        "1 x 8",
        "1x8\n",
        8,
        None,
    ],
)
def test_an_unknown_pattern_is_refused(text: object) -> None:
    with pytest.raises(GrowpruneError, match="pattern must be 'unstructured', a block like '1x8', or N:M like '2:4'"):
        parse_pattern(text)  # type: ignore[arg-type]


def test_a_long_pattern_is_not_shown_whole() -> None:
    with pytest.raises(GrowpruneError) as caught:
        parse_pattern("1x" + "9" * 100_000)
    assert len(str(caught.value)) < 200


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
block_patterns = st.sampled_from(["unstructured", "1x1", "1x2", "1x8", "2x1", "2x2", "3x2", "4x4"])


@given(shapes, block_patterns, st.booleans(), st.integers(1, 9), st.data())
def test_a_mask_written_from_groups_gives_the_groups_back(
    shape: tuple[int, ...], text: str, transposed: bool, chunk: int, data: st.DataObject
) -> None:
    pattern, weight = parse_pattern(text), Weight("w", "w", shape, transposed=transposed and len(shape) > 1)
    num_groups = pattern.num_groups(weight)
    alive = torch.tensor(data.draw(st.lists(st.booleans(), min_size=num_groups, max_size=num_groups)))
    mask = torch.zeros(shape, dtype=torch.bool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patterns, "chunk_elements", lambda device: chunk)
        sizes = [len(groups) for groups in walk_groups(pattern, mask, weight)]
        write_groups(pattern, mask, weight, iter(alive.split(sizes)))
        assert torch.equal(torch.cat(list(walk_groups(pattern, mask, weight))), alive)
        assert count_groups(pattern, mask, weight) == int(alive.sum())
    assert torch.equal(torch.cat(list(walk_groups(pattern, mask, weight))), alive)


@given(shapes, st.sampled_from(["unstructured", "1x2", "2x2", "3x4"]), st.booleans(), st.integers(1, 20), st.data())
def test_the_mask_does_not_depend_on_where_chunks_end(
    shape: tuple[int, ...], text: str, transposed: bool, chunk: int, data: st.DataObject
) -> None:
    transposed = transposed and len(shape) > 1
    values = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(0)).float()
    k = data.draw(st.integers(0, parse_pattern(text).num_groups(weight_like(values, transposed=transposed))))
    expected = kept(text, values, k, transposed=transposed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patterns, "chunk_elements", lambda device: chunk)
        assert torch.equal(kept(text, values, k, transposed=transposed), expected)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 30))
def test_at_most_n_of_every_m_live_whatever_the_shape(rows: int, windows: int, kernel: int, n: int, chunk: int) -> None:
    values = torch.randn(rows, 4 * windows, kernel, generator=torch.Generator().manual_seed(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patterns, "chunk_elements", lambda device: chunk)
        mask = kept(f"{n}:4", values, rows * windows * kernel * n)
    folded = mask.movedim(1, -1).reshape(-1, 4)
    assert folded.sum(1).tolist() == [n] * len(folded)


def test_blocks_of_a_convolution_run_along_the_input_channels() -> None:
    values = torch.zeros(1, 2, 1, 2)  # (out, in, kh, kw)
    values[0, :, 0, 0] = torch.tensor([1.0, -1.0])
    values[0, :, 0, 1] = torch.tensor([2.5, 0.0])
    mask = kept("1x2", values, 1)
    assert mask[0, :, 0, 0].tolist() == [False, False]
    assert mask[0, :, 0, 1].tolist() == [True, True]
