"""The state of a sparse model: all masks are taken back, or none, and only by a model that was made alike."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from growprune import GrowpruneError, SparseModel, load_sharded_checkpoint, save_sharded_checkpoint


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
        ({"1.weight": torch.zeros(3, dtype=torch.uint8)}, r"a mask of 3 bytes does not fit shape \(4, 4\)"),
        (
            {"2.weight": torch.zeros(2, dtype=torch.uint8)},
            r"differ in \['2.weight'\]: .*the same keep_dense and include as when",
        ),
    ],
)
def test_a_state_with_a_mask_that_does_not_fit_changes_no_mask(masks: dict[str, Tensor], message: str) -> None:
    sparse = two_layers()
    state = sparse.state_dict()
    state["masks"] = {"0.weight": torch.tensor([1, 0], dtype=torch.uint8), "1.weight": state["masks"]["1.weight"]}
    with pytest.raises(GrowpruneError, match=message):
        sparse.load_state_dict(state | {"masks": state["masks"] | masks})
    assert sparse.masks["0.weight"].flatten().tolist() == [False] * 8 + [True] * 8
    sparse.load_state_dict(state)
    assert sparse.masks["0.weight"].flatten().tolist() == [True] + [False] * 15


def made(**settings: Any) -> SparseModel:
    return SparseModel(nn.Linear(8, 8), **{"sparsity": 0.5, "seed": 1, "allocation": "erk"} | settings)


@pytest.mark.parametrize(
    ("settings", "its", "own"),
    [
        ({"seed": 2}, "seed=1", "seed=2"),
        ({"allocation": "global"}, "allocation='erk'", "allocation='global'"),
        ({"pattern": "1x4"}, "pattern='unstructured'", "pattern='1x4'"),
        (
            {"seed": 0, "allocation": "uniform", "pattern": "2:4"},
            "seed=1, allocation='erk', pattern='unstructured'",
            "seed=0, allocation='uniform', pattern='2:4'",
        ),
    ],
)
def test_a_state_is_refused_by_a_model_that_was_made_otherwise(settings: dict[str, Any], its: str, own: str) -> None:
    sparse, other = made(), made(**settings)
    sparse.prune()
    with pytest.raises(
        GrowpruneError, match=f"^the state was saved with {its}, but this SparseModel has {own}: resume with {its}, or"
    ):
        other.load_state_dict(sparse.state_dict())
    assert other.num_alive == 64


def test_a_state_may_go_to_another_sparsity_and_storage() -> None:
    sparse, other = made(), made(sparsity=0.75, storage="compact")
    sparse.prune()
    other.load_state_dict(sparse.state_dict())
    assert torch.equal(other.masks["weight"], sparse.masks["weight"])


def test_a_checkpoint_of_shards_is_refused_by_a_model_that_was_made_otherwise(tmp_path: Path) -> None:
    save_sharded_checkpoint(tmp_path / "state", made(storage="compact"))
    with pytest.raises(GrowpruneError, match="with seed=1, but this SparseModel has seed=3"):
        load_sharded_checkpoint(tmp_path / "state", made(seed=3, storage="compact"))
    load_sharded_checkpoint(tmp_path / "state", made(storage="compact"))
