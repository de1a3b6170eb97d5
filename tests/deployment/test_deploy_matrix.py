"""Matrices made quickly of whole blocks are those made the long way."""

from __future__ import annotations

import pytest
import torch

from growprune.deployment.cpu import matrix
from growprune.deployment.cpu.matrix import SparseMatrix, from_live, whole_blocks

SHAPES = [(16, 24), (8, 16, 3, 3), (16, 8, 1, 1), (8, 8, 5), (9, 13), (3, 5, 2, 2)]


def masked(shape: tuple[int, ...], height: int, width: int) -> torch.Tensor:
    """A random mask (out, in, ...) of blocks over (out, ..., in)."""
    folded = (shape[0], *shape[2:], shape[1])
    rows, columns = shape[0], torch.empty(folded)[:1].numel()
    alive = torch.rand(-(-rows // height), -(-columns // width)) < 0.4
    whole = alive.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    return whole.reshape(folded).movedim(-1, 1).contiguous()


def assert_equal(a: SparseMatrix, b: SparseMatrix) -> None:
    assert (a.rows, a.columns, a.height, a.width, a.num_alive) == (b.rows, b.columns, b.height, b.width, b.num_alive)
    for name in ("starts", "places", "values"):
        mine, other = getattr(a, name), getattr(b, name)
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other), name


@pytest.mark.parametrize("pattern", ["unstructured", "1x8", "8x1"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", ["rows", "inputs last", "transposed"])
def test_a_matrix_is_the_same_either_way(
    shape: tuple[int, ...], pattern: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    mask = masked(shape, *matrix.block_of(pattern))
    if order == "transposed":
        mask = mask.transpose(0, 1).contiguous()
    live = torch.randn(int(mask.sum()))
    options = {"pattern": pattern, "inputs_last": order == "inputs last", "transposed": order == "transposed"}
    quick = from_live(live, mask, **options)  # type: ignore[arg-type]
    monkeypatch.setattr(matrix, "whole_blocks", lambda *a, **k: None)
    assert_equal(quick, from_live(live, mask, **options))  # type: ignore[arg-type]


def test_blocks_that_are_not_whole_are_left_to_the_long_way() -> None:
    mask = masked((16, 24), 8, 1)
    assert whole_blocks(torch.randn(int(mask.sum())), mask, 8, 1, inputs_last=False) is not None
    mask[3, 5] = not mask[3, 5]
    assert whole_blocks(torch.randn(int(mask.sum())), mask, 8, 1, inputs_last=False) is None


def test_a_matrix_has_memory_of_its_own() -> None:
    live = torch.ones(4)
    found = from_live(live, torch.ones(2, 2, dtype=torch.bool))
    live.zero_()
    assert found.values.tolist() == [1, 1, 1, 1]
