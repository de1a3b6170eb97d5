"""A ranking of all layers in which weights that cost many operations count less, or more."""

import copy
from fractions import Fraction

import pytest
import torch
from torch import nn

import growprune as gp
from growprune.errors import GrowpruneError
from growprune.plan import declaration_of
from growprune.sparse.flops import count_flops
from growprune.sparse.model import SparseModel

METHODS = [
    name
    for name, method in gp.methods.METHODS.items()
    if declaration_of(method).length == "iterations" and name not in ("snip", "grasp", "parallel_gradual_gap")
]


def two_layers() -> nn.Sequential:
    """A convolution of 16 weights that is used at 16 places, and a linear layer of 64 weights that is used once."""
    model = nn.Sequential(
        nn.Conv2d(4, 4, 1, bias=False), nn.AvgPool2d(4, 1), nn.Flatten(), nn.Linear(4, 16, bias=False)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(1 + torch.arange(parameter.numel()).view_as(parameter) / parameter.numel())
    return model


IMAGE = torch.zeros(3, 4, 4, 4)


@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("power", [1 / 16, 0.0, -1 / 16, -1.0])
def test_cost_power_decides_between_layers(power: float, dtype: torch.dtype, storage: str) -> None:
    sparse = SparseModel(
        two_layers().to(dtype),
        0.5,
        allocation="global_no_floor",
        storage=storage,
        cost_power=power,
        example=IMAGE.to(dtype),
    )
    sparse.prune()
    scores = [((1 + i / 16) * 16**-power, "0.weight") for i in range(16)]
    scores += [(1 + i / 64, "3.weight") for i in range(64)]
    kept = [name for _, name in sorted(scores)[40:]]
    assert sparse.alive_by_weight() == {name: kept.count(name) for name in ("0.weight", "3.weight")}
    assert (kept.count("0.weight") == 8) is (power == 0)


def test_factors_are_exact_powers_of_relative_costs_for_any_batch() -> None:
    for batch in (1, 3, 7):
        sparse = SparseModel(
            two_layers(), 0.5, allocation="global", cost_power=0.25, example=IMAGE[:1].repeat(batch, 1, 1, 1)
        )
        assert sparse.editor.cost_factors == {"0.weight": 0.5, "3.weight": 1.0}


def test_a_power_lowers_operations_at_equal_weights() -> None:
    torch.manual_seed(0)
    shares = []
    for power in (-0.1, 0.0, 0.1):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=4), nn.Flatten(), nn.Linear(64, 10)
        )
        image = torch.zeros(1, 3, 8, 8)
        sparse = SparseModel(model, 0.8, allocation="global_no_floor", cost_power=power, example=image)
        sparse.prune()
        assert sparse.num_alive == round(Fraction(1, 5) * sparse.num_prunable)
        densities = {weight.name: sparse.alive_by_weight()[weight.name] / weight.numel for weight in sparse.weights}
        shares.append(count_flops(model, image).at(densities))
    assert shares == sorted(shares, reverse=True)
    assert len(set(shares)) == 3


def test_sparsify_takes_a_power_and_resumes_with_it() -> None:
    states = []
    for _ in range(2):
        model = two_layers()
        settings = {"sparsity": 0.5, "iterations": 4, "keep_dense": (), "cost_power": 0.25, "example": IMAGE}
        sparsifier = gp.sparsify(model, torch.optim.SGD(model.parameters(), 0.1), "gmp", **settings)
        assert sparsifier.sparse.editor.cost_factors == {"0.weight": 0.5, "3.weight": 1.0}
        states.append(sparsifier.state_dict())
    sparsifier.load_state_dict(states[0])


def test_a_state_with_another_power_is_refused() -> None:
    saved = SparseModel(two_layers(), 0.5, allocation="global", cost_power=0.5, example=IMAGE).state_dict()
    other = SparseModel(two_layers(), 0.5, allocation="global")
    with pytest.raises(GrowpruneError, match=r"cost_power=0\.5"):
        other.load_state_dict(saved)


def test_wrong_cost_power_settings_are_refused_and_leave_the_model_plain() -> None:
    with pytest.raises(GrowpruneError, match="example="):
        SparseModel(two_layers(), 0.5, allocation="global", cost_power=0.5)
    with pytest.raises(GrowpruneError, match="'erk'"):
        SparseModel(two_layers(), 0.5, allocation="erk", cost_power=0.5, example=IMAGE)
    with pytest.raises(GrowpruneError, match="nan"):
        SparseModel(two_layers(), 0.5, allocation="global", cost_power=float("nan"), example=IMAGE)
    unused = nn.Sequential(two_layers())
    unused.extra = nn.Linear(4, 4)
    unused.forward = unused[0].forward  # type: ignore[method-assign]
    with pytest.raises(GrowpruneError, match="extra"):
        SparseModel(unused, 0.5, allocation="global", cost_power=0.5, example=IMAGE)
    model = two_layers()
    with pytest.raises(GrowpruneError, match="example="):
        gp.sparsify(model, torch.optim.SGD(model.parameters(), 0.1), sparsity=0.5, iterations=4, cost_power=0.5)
    assert not any(hasattr(module, "_growprune_sparse_model") for module in model.modules())


@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_a_power_and_resumes(name: str) -> None:
    def begun() -> tuple[nn.Module, torch.optim.Optimizer, gp.Sparsifier]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 16), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        how = {"sparsity": 0.6, "iterations": 12, "allocation": "global", "cost_power": 0.1, "example": IMAGE}
        return model, optimizer, gp.sparsify(model, optimizer, name, **how)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(3, 4, 4, 4)).square().mean().backward()
            optimizer.step()

    model, optimizer, sparsifier = begun()
    train(model, optimizer, range(6))
    state = copy.deepcopy(sparsifier.state_dict())  # which refers to tensors, as those of torch do
    train(model, optimizer, range(6, 12))
    assert sparsifier.sparse.num_alive == round(0.4 * sparsifier.sparse.num_prunable)
    again, its_optimizer, resumed = begun()
    resumed.load_state_dict(state)
    train(again, its_optimizer, range(6, 12))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
