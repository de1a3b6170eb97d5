"""The masks of a state: all of them are taken back, or none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from growprune import GrowpruneError, SparseModel


def two_layers() -> SparseModel:
    """Of 16 weights each, the larger half alive."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for layer in model:
        layer.weight.data = torch.arange(16.0).view(4, 4)
    sparse = SparseModel(model, sparsity=0.5)
    sparse.prune()
    return sparse


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"1.weight": torch.zeros(3, dtype=torch.uint8)}, r"a mask of 3 bytes is not one of shape \(4, 4\)"),
        ({"2.weight": torch.zeros(2, dtype=torch.uint8)}, r"prunable weights differ in \['2.weight'\]"),
    ],
)
def test_a_state_with_a_mask_that_does_not_fit_changes_no_mask(masks: dict[str, Tensor], message: str) -> None:
    sparse = two_layers()
    state = sparse.state_dict()
    state["masks"] = {"0.weight": torch.tensor([1, 0], dtype=torch.uint8), "1.weight": state["masks"]["1.weight"]}
    with pytest.raises(GrowpruneError, match=message):
        sparse.load_state_dict(state | {"masks": state["masks"] | masks})
    assert sparse.mask("0.weight").flatten().tolist() == [False] * 8 + [True] * 8
    sparse.load_state_dict(state)
    assert sparse.mask("0.weight").flatten().tolist() == [True] + [False] * 15
