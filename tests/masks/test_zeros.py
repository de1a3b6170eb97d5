"""A model that is sparse already: its zeros become its masks."""

from typing import Any

import pytest
import torch
from torch import nn

import growprune as gp
from growprune.masks.inspection import already_sparse
from growprune.masks.layers import prunable_weights
from growprune.sparse.cursor import Cursor


def pruned_elsewhere(**settings: Any) -> nn.Sequential:
    """A plain model with the zeros that somebody else made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    sparse = gp.SparseModel(model, **({"sparsity": 0.75, "allocation": "global"} | settings))
    sparse.prune()
    sparse.to_dense_()
    return model


storages = pytest.mark.parametrize("storage", ["masked", "compact"])


@storages
def test_just_the_zeros_are_dead_and_nothing_else_changes(storage: str) -> None:
    model = pruned_elsewhere()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sparse = gp.SparseModel.from_zeros(model, storage=storage)
    assert (sparse.num_alive, sparse.num_prunable, sparse.target_sparsity) == (40, 160, 0.75)
    assert sparse.is_at_target
    assert all(torch.equal(mask, before[name] != 0) for name, mask in sparse.masks.items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("pattern", "alive"), [("1x4", 40), ("2:4", 40)])
@storages
def test_patterns_are_found_again(pattern: str, alive: int, storage: str) -> None:
    model = pruned_elsewhere(pattern=pattern)
    if pattern == "1x4":  # a zero in a live block: the block lives
        row, column = model[0].weight.nonzero()[0].tolist()
        model[0].weight.data[row, column] = 0
    assert gp.SparseModel.from_zeros(model, pattern=pattern, storage=storage).num_alive == alive


def test_zeros_that_do_not_keep_to_the_pattern_are_refused() -> None:
    with pytest.raises(gp.GrowpruneError, match=r"zeros of 0.weight do not have the pattern 1:4: use another"):
        gp.SparseModel.from_zeros(pruned_elsewhere(pattern="2:4", sparsity=0.5), pattern="1:4")


def test_a_dense_model_is_refused_and_left_alone() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    model[0].weight.data[0, :3] = 0
    message = (
        r"the model is dense: only 3 of its 160 prunable weights are zero \(1.88%, .*5%.*SparseModel\(model, sparsity"
    )
    with pytest.raises(gp.GrowpruneError, match=message):
        gp.SparseModel.from_zeros(model, storage="compact")
    assert model[0].weight.shape == (8, 16)


def test_the_zeros_of_what_is_kept_dense_live() -> None:
    model = pruned_elsewhere()
    sparse = gp.SparseModel.from_zeros(model, keep_dense=["2"])
    assert list(sparse.masks) == ["0.weight"]
    assert sparse.num_alive == int(model[0].weight.count_nonzero())
    attention = nn.MultiheadAttention(8, 2, bias=False)
    attention.in_proj_weight.data[:12] = 0  # all of q and half of k
    sparse = gp.SparseModel.from_zeros(attention, keep_dense=["in_proj_weight[q]"])
    assert sparse.masks["in_proj_weight"].sum(1).tolist() == [8] * 8 + [0] * 4 + [8] * 12


def test_a_layer_of_zeros_is_named_in_a_warning() -> None:
    model = pruned_elsewhere()
    model[2].weight.data.zero_()
    with pytest.warns(UserWarning, match=r"all weights of 2.weight are zero.* add them to keep_dense"):
        gp.SparseModel.from_zeros(model)


def test_a_plan_can_go_on_from_the_zeros_as_they_are() -> None:
    sparse = gp.SparseModel.from_zeros(pruned_elsewhere())
    S = gp.Partition.per_layer(sparse.model)
    plan = gp.methods.cyclic_gap(S, sparsity=0.75, steps=2, epochs=1, finetune=1, initial_mask="as_is")
    masks = sparse.masks
    phases = iter(Cursor(sparse, plan))
    next(phases)
    assert all(torch.equal(mask, masks[name]) for name, mask in sparse.masks.items())
    assert [sparse.num_alive for _ in phases][-1] == 40


# Models that look pruned


def found(model: nn.Module) -> float | None:
    return already_sparse(model, prunable_weights(model))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))


def test_a_model_looks_pruned_from_a_fifth_of_zeros_on() -> None:
    model = layers()
    assert found(model) is None
    model[0].weight.data.view(-1)[:39] = 0  # of 200
    assert found(model) is None
    model[0].weight.data.view(-1)[39] = 0
    assert found(model) == 0.2
    model[1].weight.data[1:] = 0
    assert found(model) == 0.65


def test_layers_that_are_initialised_to_zero_do_not_look_pruned() -> None:
    model = layers()
    nn.init.zeros_(model[1].weight)
    assert found(model) is None
    nn.init.zeros_(model[0].weight)
    assert found(model) is None
    attention = nn.MultiheadAttention(8, 2)
    attention.in_proj_weight.data[:8] = 0  # that of q
    assert found(attention) is None
    attention.in_proj_weight.data[8:, 2:] = 0
    assert found(attention) == pytest.approx(2 * 48 / 192)  # of k, v and out


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_weights_that_are_not_there_as_dense_tensors_are_not_looked_at(storage: str) -> None:
    sparse = gp.SparseModel(layers(), sparsity=0.9, storage=storage)
    sparse.prune()
    expected = {"masked": 0.9, "compact": None}[storage]
    assert already_sparse(sparse.model, sparse.weights) == expected
    assert found(layers().to("meta")) is None


@storages
def test_what_is_dead_stays_dead_in_training(storage: str) -> None:
    sparse = gp.SparseModel.from_zeros(pruned_elsewhere(), storage=storage)
    optimizer = sparse.attach(torch.optim.AdamW(sparse.model.parameters(), lr=0.1))
    for _ in range(3):
        sparse.model(torch.randn(4, 16)).square().sum().backward()
        optimizer.step()
    assert sum(int(t.count_nonzero()) for n, t in sparse.model.state_dict().items() if "weight" in n) == 40
