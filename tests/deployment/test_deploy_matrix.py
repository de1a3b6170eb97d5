"""Matrices of live values: their blocks, in order."""

import pytest
import torch

from growprune.deployment.cpu.matrix import block_of, from_dense

SHAPES = [(16, 24), (8, 16, 3, 3), (16, 8, 1, 1), (8, 8, 5), (9, 13), (3, 5, 2, 2)]


def masked(shape: tuple[int, ...], height: int, width: int) -> torch.Tensor:
    """A random mask (out, in, ...) of blocks over (out, ..., in)."""
    folded = (shape[0], *shape[2:], shape[1])
    rows, columns = shape[0], torch.empty(folded)[:1].numel()
    alive = torch.rand(-(-rows // height), -(-columns // width)) < 0.4
    whole = alive.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    return whole.reshape(folded).movedim(-1, 1).contiguous()


def blocks_of(weight: torch.Tensor, mask: torch.Tensor, height: int, width: int) -> tuple[list[int], ...]:
    """Starts, places and values of a folded weight, block by block."""
    starts, places, values = [0], list[int](), list[float]()
    overhang = (0, -mask.shape[1] % width, 0, -mask.shape[0] % height)
    weight, mask = (torch.nn.functional.pad(x, overhang) for x in (weight, mask))
    for row in range(0, mask.shape[0], height):
        for column in range(0, mask.shape[1], width):
            cut = slice(row, row + height), slice(column, column + width)
            if mask[cut].any():
                places.append(column // width)
                values += weight[cut].flatten().tolist()
        starts.append(len(places))
    return starts, places, values  # type: ignore[return-value]


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("pattern", ["unstructured", "1x8", "8x1"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("transposed", [True, False])
def test_a_matrix_has_the_live_blocks_row_by_row(
    shape: tuple[int, ...], pattern: str, transposed: bool, is_whole: bool
) -> None:
    torch.manual_seed(0)
    height, width = block_of(pattern)
    mask = masked(shape, height, width)
    mask &= is_whole | (torch.rand(shape) < 0.5)
    weight = torch.where(mask, torch.randn(shape), 0.0)
    folded, folded_mask = (x.movedim(1, -1).flatten(1) for x in (weight, mask))
    starts, places, values = blocks_of(folded, folded_mask, height, width)
    noisy = torch.where(mask, weight, float("nan"))  # what is dead does not count, whatever it is
    given = [x.transpose(0, 1).contiguous() if transposed else x for x in (noisy, mask)]
    found = from_dense(*given, pattern=pattern, transposed=transposed)
    assert (found.rows, found.columns, found.height, found.width) == (*folded.shape, height, width)
    assert found.num_alive == int(mask.sum())
    assert (found.starts.tolist(), found.places.tolist(), found.values.tolist()) == (starts, places, values)
    assert (found.starts.dtype, found.places.dtype, found.values.dtype) == (torch.int64, torch.int32, torch.float32)
    assert torch.equal(found.dense(), folded)


def test_a_matrix_has_memory_of_its_own() -> None:
    weight = torch.ones(2, 2)
    found = from_dense(weight)
    weight.zero_()
    assert found.values.tolist() == [1, 1, 1, 1]
