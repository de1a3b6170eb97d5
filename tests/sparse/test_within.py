"""Growth that keeps to a share of the model: a memory budget that a ranking cannot break."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import phases_of
from torch import nn

import growprune as gp
from growprune.engine.cost import estimate
from growprune.engine.override import override
from growprune.methods import gradual_gap
from growprune.plan import By, Spread, prune
from growprune.recipes import RECIPES


def four_layers(*scales: float, **options: object) -> gp.SparseModel:
    """Layers of 100 weights each, of these magnitudes at most."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in scales))
    for layer, scale in zip(model, scales, strict=True):
        layer.weight.data.uniform_(0.5 * scale, scale)
    return gp.SparseModel(model, **{"sparsity": 0.9, "allocation": "global_no_floor", **options})  # type: ignore[arg-type]


@torch.no_grad()
def train(sparse: gp.SparseModel, scales: list[float]) -> None:
    """All live weights get new values, those of each layer of its magnitude."""
    for weight, values, scale in zip(sparse.weights, sparse.model.parameters(), scales, strict=True):
        values.uniform_(0.5 * scale, scale)
        if sparse.storage == "masked":
            values.mul_(sparse.masks[weight.parameter])


def alive(sparse: gp.SparseModel) -> list[int]:
    return list(sparse.alive_by_weight().values())


@pytest.mark.filterwarnings("ignore:layer.* pruned to zero weights")
def test_as_much_of_a_part_grows_as_the_share_leaves_room_for() -> None:
    sparse = four_layers(0.1, 1.0, 1.0, 1.0)
    first, *_ = parts = gp.Partition.per_layer(sparse.model)
    sparse.apply(prune(parts.whole, to=0.5))
    before = alive(sparse)
    assert before[0] == 0
    assert sum(before) == 200
    sparse.apply(gp.grow(first, within=0.6))
    assert alive(sparse) == [40, *before[1:]]  # 240 of 400 may live
    sparse.apply(prune(parts.whole, to=0.5))
    sparse.apply(gp.grow(first, within=0.6024))
    assert sum(alive(sparse)) == 240  # 240.96 are no 241


def test_where_each_layer_rounds_for_itself_a_part_grows_whole_in_spite_of_it() -> None:
    """At 0.35 sparse, 2 of 3 live in each of 5 layers, as 1.95 is rounded; with one of them dense, 11 of 15.

    That is more than 0.65 + 0.35 / 5 = 0.72 of them, 10.8, but by less than half a weight a layer.
    """
    model = nn.Sequential(*(nn.Linear(3, 1, bias=False) for _ in range(5)))
    sparse = gp.SparseModel(model, sparsity=0.9)
    parts = gp.Partition.per_layer(model)
    sparse.apply(prune(parts.whole, to=0.35), gp.grow(parts[0], within=0.72))
    assert alive(sparse) == [3, 2, 2, 2, 2]
    sparse.apply(gp.grow(parts[1], within=0.85), gp.grow(parts[2], within=0.85))  # 12.75 and 2.5 are 15, no more
    assert alive(sparse) == [3, 3, 3, 2, 2]
    sparse.apply(gp.grow(parts[3], within=0.7))
    assert alive(sparse) == [3, 3, 3, 2, 2]


@pytest.mark.filterwarnings("ignore:layer.* pruned to zero weights")
def test_what_there_was_no_room_for_is_drawn_anew_at_each_growth() -> None:
    sparse = four_layers(0.1, 1.0, 1.0, 1.0)
    first, *_ = parts = gp.Partition.per_layer(sparse.model)
    seen = torch.zeros(10, 10, dtype=torch.bool)
    for _ in range(12):
        sparse.apply(prune(parts.whole, to=0.5))
        sparse.apply(gp.grow(first, within=0.6))
        seen |= sparse.masks["0.weight"]
    assert bool(seen.all())


def test_a_part_that_fits_becomes_dense_and_one_without_room_stays_as_it_is() -> None:
    sparse = four_layers(1.0, 1.0, 1.0, 1.0)
    first, *_ = parts = gp.Partition.per_layer(sparse.model)
    sparse.apply(prune(parts.whole, to=0.5))
    before = alive(sparse)
    sparse.apply(gp.grow(first, within=0.4))
    assert alive(sparse) == before
    sparse.apply(gp.grow(first, within=0.7))
    assert alive(sparse) == [100, *before[1:]]


@pytest.mark.filterwarnings("ignore:layer.* pruned to zero weights")
@settings(deadline=None, max_examples=40)
@given(
    scales=st.lists(st.sampled_from([0.01, 0.3, 1.0, 1.1, 5.0]), min_size=4, max_size=7),
    peak=st.sampled_from([0.45, 0.6, 0.8]),
    storage=st.sampled_from(["masked", "compact"]),
    pattern=st.sampled_from(["unstructured", "1x5"]),
    allocation=st.sampled_from(["global_no_floor", "uniform", "erk"]),
)
def test_no_more_than_the_peak_ever_lives_whatever_the_ranking_says(
    scales: list[float], peak: float, storage: str, pattern: str, allocation: str
) -> None:
    sparse = four_layers(*scales, storage=storage, pattern=pattern, allocation=allocation)
    total, size = sparse.num_prunable, 1 if pattern == "unstructured" else 5
    parts = gp.Partition.balanced(sparse.model, 4)
    peak = max(peak, 1 - 0.9 * (1 - parts.largest_share))
    plan = gradual_gap(parts, sparsity=0.9, iterations=60, every=1, peak_density=peak)
    found = []
    for _ in phases_of(sparse, plan):
        found.append(sparse.num_alive)
        train(sparse, scales)
    assert max(found) <= peak * total + (0 if allocation != "uniform" else size * len(scales) / 2) + 1e-6
    assert found[-1] <= 0.1 * total + size


def test_where_all_layers_are_alike_every_part_becomes_dense() -> None:
    sparse = gp.SparseModel(four_layers(1.0, 1.0, 1.0, 1.0).model, sparsity=0.9, allocation="uniform")
    plan = gradual_gap(
        gp.Partition.per_layer(sparse.model), sparsity=0.9, iterations=8, every=1, until=0.5, grow_until=1.0
    )
    grown = [max(alive(sparse)) for _ in phases_of(sparse, plan)][1:5]
    assert grown == [100] * 4


def test_a_plan_is_priced_with_what_it_keeps_to() -> None:
    settings = {"method": "gradual_gap", "options.epochs": "2", "sparsity": "0.9", "parts": "balanced(3)"}
    recipe = override(RECIPES["digits/tiny"](), {**settings, "options.peak_density": "0.8"})
    assert estimate(recipe).peak_density == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("more", [{"to": 0.5}, {"share": 0.5}, {"by": By.GRADIENT}, {"spread": Spread.LIVE}])
def test_within_is_only_for_growth_to_dense(more: dict[str, object]) -> None:
    part = gp.Part("S0", ("0.weight",))
    with pytest.raises(gp.GrowpruneError, match=r"^within=0.6 is only for growth to dense"):
        gp.grow(part, within=0.6, **more)  # type: ignore[arg-type]
    with pytest.raises(gp.GrowpruneError, match=r"^within must be in \[0, 1\], got 1.5"):
        gp.grow(part, within=1.5)
