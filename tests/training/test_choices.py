"""Choices that a user leaves open: made once, by what a method declares, and refused before anything is changed."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from toy import Toy

import growprune as gp
from growprune.engine.folder import fields_of
from growprune.engine.override import override
from growprune.engine.recipe import OptimizerConfig
from growprune.plan import first_by


def net(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(5)), nn.Linear(width, 2))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-3)


def half_zero(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and name != "5.weight":
                parameter.flatten()[::2] = 0
    return model


# What a method declares


@gp.method
def undeclared(
    S: Any,
    *,
    sparsity: float,
    iterations: int,
    start: int = 10,
    peak_density: int = 3,
    every: int = 500,
    steps: int = 2,
    finetune: int = 1,
    kappa: int = 9,
    seed: int = 7,
    initial_mask: str = "random",
) -> Iterator[gp.Phase]:
    """Use names of our own methods for other things."""
    yield gp.Phase(gp.prune(S.whole, to=sparsity, by=first_by(initial_mask)), iterations=iterations)  # type: ignore[arg-type]


@gp.method(rises_from="low", first_mask="mask", seed="random_seed", every="pause", length="iterations")
def declared(
    S: Any,
    *,
    sparsity: float,
    iterations: int,
    low: float = 0.25,
    mask: str = "random",
    random_seed: int = 0,
    pause: int = 500,
) -> Iterator[gp.Phase]:
    """Say what its parameters are."""
    yield gp.Phase(gp.prune(S.whole, to=low, by=first_by(mask)), iterations=iterations // 2)  # type: ignore[arg-type]
    yield gp.Phase(gp.prune(S.whole, to=sparsity), iterations=iterations - iterations // 2)


@pytest.mark.parametrize("model", [net(), half_zero(net())])
def test_undeclared_parameters_are_never_filled_in(model: nn.Module) -> None:
    sparsifier = gp.sparsify(model, adam(model), undeclared, sparsity=0.75, iterations=20, seed=5)
    assert sparsifier.plan.options == {"sparsity": 0.75, "iterations": 20}
    assert sparsifier.sparse.lr_scaling == 0
    recipe = gp.Recipe(Toy(depth=5), undeclared, {"epochs": 2}, sparsity=0.75)
    assert recipe.plan(recipe.task.build_model(), 4).options == {"sparsity": 0.75, "iterations": 8}


def test_declared_parameters_are_filled_in_whatever_their_names() -> None:
    model = net()
    plan = gp.sparsify(model, adam(model), declared, sparsity=0.75, iterations=80, seed=5).plan
    filled = {"sparsity": 0.75, "iterations": 80, "random_seed": 5, "pause": 2}
    assert plan.options == {**filled, "mask": "random"}
    model = half_zero(net())
    with pytest.warns(UserWarning, match="already zero"):
        plan = gp.sparsify(model, adam(model), declared, sparsity=0.75, iterations=80, seed=5, allocation="global").plan
    assert plan.options == {**filled, "mask": "as_is", "low": 0.5}


def test_initial_mask_needs_a_declaration() -> None:
    model = net()
    with pytest.raises(gp.GrowpruneError, match=r"undeclared .*initial_mask='magnitude'.*first_mask='initial_mask'"):
        gp.sparsify(model, adam(model), undeclared, sparsity=0.75, iterations=20, initial_mask="magnitude")


@pytest.mark.parametrize(
    ("said", "offending"),
    [({"rises_from": "begin"}, "'begin'"), ({"length": "rounds"}, "'rounds'"), ({"length": "epochs"}, "'epochs'")],
)
def test_a_declaration_of_unknown_parameters_is_refused(said: dict[str, str], offending: str) -> None:
    def alone(S: Any, *, sparsity: float) -> Iterator[gp.Phase]:
        yield gp.Phase(gp.prune(S.whole, to=sparsity))

    with pytest.raises(gp.GrowpruneError, match=offending):
        gp.method(**said)(alone)


# Refusals change nothing


def test_a_refused_sparsify_keeps_the_target_of_a_sparse_model() -> None:
    sparse = gp.sparse_init(net, sparsity=0.5, keep_dense=["5"], allocation="global")
    with pytest.raises(gp.GrowpruneError, match="trains none of the weights"):
        gp.sparsify(sparse, adam(net()), sparsity=0.9, iterations=20)
    assert sparse.target_sparsity == 0.5
    gp.sparsify(sparse, adam(sparse.model), sparsity=0.9, iterations=20, keep_dense=["5"])
    assert sparse.target_sparsity == 0.9


# Defaults that fit


@pytest.mark.parametrize(("pattern", "start"), [("1:4", 0.75), ("2:8", 0.75), ("2:4", None)])
def test_a_rising_sparsity_starts_where_its_pattern_can(pattern: str, start: float | None) -> None:
    model = net()
    sparsifier = gp.sparsify(model, adam(model), sparsity=0.9, iterations=20, pattern=pattern)
    assert sparsifier.plan.options.get("start") == start


def test_a_recipe_of_three_layers_has_three_parts() -> None:
    recipe = gp.Recipe(Toy(depth=2), gp.methods.gradual_gap, {"epochs": 4}, sparsity=0.75)
    assert len(recipe.plan(recipe.task.build_model(), 4).partition) == 2  # the last of three stays dense


# lr_scaling="auto" stays "auto"


def exponent_of(recipe: gp.Recipe) -> Any:
    return fields_of(recipe)["lr_scaling"]


def test_auto_means_what_the_method_and_the_optimizer_of_now_mean() -> None:
    dense = gp.Recipe(Toy(), gp.methods.dense, {"epochs": 2}, sparsity=0.75, optimizer=OptimizerConfig("adamw", 0.01))
    rising = replace(dense, method=gp.methods.gradual_gap)
    assert [exponent_of(recipe) for recipe in (dense, rising)] == [0.0, 1.0]
    assert exponent_of(override(dense, {"method": "granet"})) == 1.0
    assert exponent_of(override(rising, {"method": "rigl"})) == 0.0
    assert exponent_of(override(rising, {"optimizer.kind": "sgd"})) == 0.0
    assert exponent_of(override(rising, {"weights": "trained.safetensors"})) == 0.0
    assert exponent_of(override(dense, {"lr_scaling": "0.5", "method": "gradual_gap"})) == 0.5
    model = rising.task.build_model()
    assert rising.resolve(model, 4).sparse_settings()["lr_scaling"] == "auto"  # the optimizer is Adam-like
    assert replace(rising, method=gp.methods.rigl).resolve(model, 4).sparse_settings()["lr_scaling"] == 0.0


def test_allocation_and_parts_follow_the_method() -> None:
    dense = gp.Recipe(Toy(), gp.methods.dense, {"epochs": 2}, sparsity=0.75, parts=2)
    fields = fields_of(override(dense, {"method": "gradual_gap"}))
    assert (fields["allocation"], fields["parts.name"], fields["parts.kappa"]) == ("global", "Balanced", 2)


class HeadFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(16, 2), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(x))
        return result


class HeadFirstToy(Toy):
    def build_model(self) -> nn.Module:
        return HeadFirst()

    def example(self) -> torch.Tensor:
        return torch.zeros(1, 8)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_recipe_keeps_the_layer_dense_to_which_its_example_leads_not_the_last_one(device: str) -> None:
    recipe = gp.Recipe(HeadFirstToy(), gp.methods.gmp, {"epochs": 2}, sparsity=0.75)
    with torch.device(device):
        resolved = recipe.resolve(recipe.task.build_model(), 4)
    assert resolved.keep_dense == ("head",) and "example" in resolved.how_kept
