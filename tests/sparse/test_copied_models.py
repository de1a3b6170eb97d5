"""`copy.deepcopy` of a model with masked weights: a plain optimizer keeps its zeros."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import growprune as gp
from growprune.plan import By


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def pruned(*, attach: bool = True) -> tuple[gp.SparseModel, Tensor]:
    torch.manual_seed(0)
    sparse = gp.SparseModel(tiny(), sparsity=0.75)
    sparse.prune()
    if attach:
        sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.1))
    return sparse, torch.randn(6, 8)


def train(model: nn.Module, x: Tensor, make: Callable[..., Any] = torch.optim.SGD, **options: Any) -> None:
    optimizer = make(model.parameters(), **({"lr": 0.05} | options))
    for _ in range(3):
        optimizer.zero_grad()
        (model(x) - 1).square().sum().backward()
        optimizer.step()


def alive(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() != 0 for name, p in model.named_parameters() if p.dim() > 1}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("is_attached", [True, False])
def test_a_deepcopy_keeps_its_zeros_under_a_plain_optimizer(optimizer: str, is_attached: bool) -> None:
    sparse, x = pruned(attach=is_attached)
    before = {name: tensor.clone() for name, tensor in sparse.model.state_dict().items()}
    clone = copy.deepcopy(sparse.model)
    make, options = OPTIMIZERS[optimizer]
    train(clone, x, make, **options)
    assert same(alive(clone), sparse.masks)
    assert not torch.equal(clone[0].weight, before["0.weight"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in sparse.model.state_dict().items())


def test_a_copy_of_a_copy_and_one_that_outlives_the_sparse_model_keep_their_zeros() -> None:
    sparse, x = pruned()
    masks, clone = sparse.masks, copy.deepcopy(sparse.model)
    again = copy.deepcopy(clone)
    del sparse
    for model in (clone, again):
        train(model, x)
        assert same(alive(model), masks)


def test_a_copy_is_as_sparse_as_the_model_was_when_it_was_made() -> None:
    sparse, x = pruned()
    masks, clone = sparse.masks, copy.deepcopy(sparse.model)
    sparse.grow()
    train(clone, x)
    assert same(alive(clone), masks)


def test_a_layer_can_be_copied_by_itself_and_a_frozen_one_unfrozen_later() -> None:
    sparse, x = pruned()
    sparse.model.requires_grad_(False)
    layer = copy.deepcopy(sparse.model[0])
    assert not layer.weight.requires_grad
    train(layer.requires_grad_(True), x)
    assert torch.equal(layer.weight != 0, sparse.masks["0.weight"])


def test_a_copy_that_is_masked_anew_trains_what_lives_now() -> None:
    sparse, x = pruned()
    clone = copy.deepcopy(sparse.model)
    sparse.prune(share=0.5)
    sparse.grow(to=0.75, by=By.RANDOM)
    sparse.mask_copy(clone)
    train(clone, x)
    train(clone, x)
    assert same({n: m & sparse.masks[n] for n, m in alive(clone).items()}, alive(clone))
    assert int(alive(clone)["0.weight"].sum()) > 20  # 16 outlived the prune, and grown ones have moved


def test_a_sparse_model_of_a_copy_decides_from_then_on() -> None:
    sparse, x = pruned()
    clone = copy.deepcopy(sparse.model)
    second = gp.SparseModel(clone, sparsity=0.5)
    second.grow()  # all of it, zeros included, as it is meant here
    optimizer = second.attach(torch.optim.SGD(clone.parameters(), lr=0.05))
    (clone(x) - 1).square().sum().backward()
    optimizer.step()
    assert int(clone[2].weight.count_nonzero()) > 48
    second.prune()
    assert second.num_alive == 96
    third = copy.deepcopy(second.to_dense_())
    train(third, x)
    assert int(third[2].weight.count_nonzero()) > 48


def test_a_deepcopy_of_a_sparse_model_follows_its_own_edits() -> None:
    sparse, x = pruned()
    clone = copy.deepcopy(sparse)
    clone.grow(to=0.5, by=By.RANDOM)
    train(clone.model, x)
    assert same({n: m & clone.masks[n] for n, m in alive(clone.model).items()}, alive(clone.model))
    assert clone.num_alive == 96
    assert sparse.num_alive == 48
    assert int(clone.model[2].weight.count_nonzero()) > 16


def test_a_tied_weight_is_tied_and_sparse_in_a_copy() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    sparse = gp.SparseModel(model, sparsity=0.75)
    sparse.prune()
    clone = copy.deepcopy(model)
    assert clone[0].weight is clone[1].weight
    train(clone, torch.randn(6, 8))
    assert torch.equal(clone[0].weight != 0, sparse.masks["0.weight"])


def test_pickles_of_a_masked_model_and_of_its_copy_are_plain_models() -> None:
    sparse, x = pruned()
    train(clone := copy.deepcopy(sparse.model), x)
    for model in (sparse.model, clone):
        assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert torch.equal(loaded(x), model(x))
        assert torch.equal(copy.deepcopy(loaded)(x), model(x))
        assert b"growprune.s" not in pickle.dumps(model)
