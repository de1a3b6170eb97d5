"""A model that is sparse already is pruned further: whatever the method, the storage and the allocation."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import growprune as gp
from growprune.training.sparsifier import sparsify

STORAGES = pytest.mark.parametrize("storage", ["masked", "compact"])


def sparse_net(sparsity: float = 0.75) -> nn.Module:
    """A net of 512 + 1,024 weights that may be pruned, a quarter of them alive."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    gp.SparseModel(model, sparsity, allocation="global", keep_dense=["4"]).prune()
    return model


def live(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name in ("0.weight", "2.weight")}


def train(model: nn.Module, method: str, steps: int = 12, **given: Any) -> gp.Sparsifier:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    sparsifier = sparsify(model, optimizer, method, iterations=steps, **given)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    return sparsifier


@STORAGES
def test_the_weights_that_are_kept_are_trained(storage: str) -> None:
    model = sparse_net()
    before = live(model)
    sparsifier = train(
        model,
        "gradual_gap",
        sparsity=0.875,
        initial_mask="as_is",
        storage=storage,
        allocation="global",
        control="start",
    )
    assert sparsifier.sparse.num_alive == 192
    for name, after in live(model).items():
        assert not (after[before[name] == 0]).any()  # without growth, what was zero stays zero
        assert (after != before[name])[after != 0].float().mean() > 0.5  # some lead nowhere, and have no gradient


def test_masked_and_compact_give_the_same_bits_from_the_zeros_of_a_model() -> None:
    found = []
    for storage in ("masked", "compact"):
        model = sparse_net()
        train(model, "gradual_gap", sparsity=0.875, initial_mask="as_is", storage=storage)
        found.append(live(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


METHODS = ("gradual_gap", "cyclic_gap", "rigl", "set", "granet", "static_random")


@STORAGES
@pytest.mark.parametrize("allocation", ["global", "uniform", "erk"])
@pytest.mark.parametrize("method", METHODS)
def test_auto_works_with_every_method_and_allocation(method: str, allocation: str, storage: str) -> None:
    model = sparse_net()
    with pytest.warns(UserWarning, match=r"0\.75 of the model's weights are already zero"):
        sparsifier = train(model, method, sparsity=0.875, allocation=allocation, storage=storage)
    assert sparsifier.is_finished
    assert sparsifier.sparse.num_alive == 192


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("sparsity", "alive"), [(0.5, 768), (0.74, 399), (0.75, 384)])
def test_a_model_that_is_sparser_than_asked_ends_as_sparse_as_asked(sparsity: float, alive: int, method: str) -> None:
    model = sparse_net()
    with pytest.warns(UserWarning, match="already zero"):
        sparsifier = train(model, method, sparsity=sparsity, allocation="global")
    assert sparsifier.sparse.num_alive == alive


def test_what_is_said_of_the_first_mask_gives_what_auto_chooses_without_a_word() -> None:
    for allocation, mask in (("global", "as_is"), ("uniform", "magnitude")):
        one, other = sparse_net(), sparse_net()
        with pytest.warns(UserWarning, match=f"initial_mask='{mask}' to silence this warning"):
            sparsify(one, torch.optim.SGD(one.parameters(), 0.1), sparsity=0.875, iterations=8, allocation=allocation)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            said = sparsify(
                other,
                torch.optim.SGD(other.parameters(), 0.1),
                sparsity=0.875,
                iterations=8,
                allocation=allocation,
                initial_mask=mask,
            )
        assert said.plan.options["start"] == 0.75
        assert all(torch.equal(tensor, live(other)[name]) for name, tensor in live(one).items())
