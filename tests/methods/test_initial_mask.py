"""How a method that begins sparse comes to its first mask: at random, by magnitude, or as the model is."""

import inspect
from typing import Any

import pytest
import torch
from plan_cases import plan_of
from torch import nn

import growprune as gp
from growprune.engine.override import override
from growprune.methods import METHODS
from growprune.plan import Action, By, Edit, Part, grow, prune, walk
from growprune.recipes import RECIPES
from growprune.sparse.cursor import Cursor


def takes_initial_mask(name: str) -> bool:
    return "initial_mask" in inspect.signature(METHODS[name].__wrapped__).parameters  # type: ignore[attr-defined]


BEGIN_SPARSE = [name for name in METHODS if takes_initial_mask(name)]
every_one = pytest.mark.parametrize("name", BEGIN_SPARSE)


def parts() -> gp.Partition:
    return gp.Partition(tuple(Part(f"S{i}", (f"{2 * i}.weight",)) for i in range(4)))


def first_edit(plan: Any) -> Edit:
    return walk(plan)[0].phase.edits[0]


def four_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())))


def largest(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Written another way: those that reach the count-th magnitude."""
    return tensor.abs() >= tensor.abs().flatten().sort(descending=True).values[count - 1]


def test_just_the_methods_that_begin_with_a_random_mask_take_one() -> None:
    at_random = [name for name in METHODS if first_edits(name) and first_edits(name)[0].by is By.RANDOM]
    assert at_random == BEGIN_SPARSE
    assert len(BEGIN_SPARSE) == 12


def first_edits(name: str) -> tuple[Edit, ...]:
    return walk(plan_of(name, parts()))[0].phase.edits


@every_one
def test_initial_mask_changes_only_how_the_first_edit_ranks(name: str) -> None:
    usual = list(walk(plan_of(name, parts())))
    for initial_mask in ("magnitude", "as_is"):
        plan = list(walk(plan_of(name, parts(), initial_mask=initial_mask)))
        first = plan[0].phase.edits[0]
        assert (first.action, first.part.name, first.by.value) == (Action.PRUNE, "all", initial_mask)
        assert first.to == usual[0].phase.edits[0].to
        assert plan[0].phase.edits[1:] == usual[0].phase.edits[1:]
        assert plan[1:] == usual[1:]


@every_one
def test_another_word_is_refused_where_the_plan_is_written(name: str) -> None:
    with pytest.raises(gp.GrowpruneError, match=r"initial_mask must be one of random, .*, got 'gradient'"):
        plan_of(name, parts(), initial_mask="gradient")


@every_one
@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_by_magnitude_the_largest_weights_of_each_layer_live_first(name: str, storage: str) -> None:
    model = four_layers()
    before = [model[i].weight.detach().clone() for i in (0, 2, 4, 6)]
    sparse = gp.SparseModel(model, sparsity=0.75, storage=storage)
    plan = plan_of(name, gp.Partition.per_layer(model), sparsity=0.75, initial_mask="magnitude")
    first = first_edit(plan)
    assert first.to in (0.5, 0.4 / 0.75, 0.75)  # granet, gradual_gap, and all that begin at the target
    sparse.apply(first)
    for old, mask in zip(before, sparse.masks.values(), strict=True):
        assert torch.equal(mask, largest(old, 64 - int(64 * first.to)))  # type: ignore[operator]
        assert int(mask.sum()) == 64 - int(64 * first.to)  # type: ignore[operator]


@every_one
@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_as_is_leaves_masks_and_weights_alone(name: str, storage: str) -> None:
    sparse = gp.SparseModel(four_layers(), sparsity=0.75, storage=storage)
    plan = plan_of(name, gp.Partition.per_layer(sparse.model), sparsity=0.75, initial_mask="as_is")
    first = first_edit(plan)
    sparse.prune(to=first.to, by=By.RANDOM)
    masks, state = sparse.masks, {name: t.clone() for name, t in sparse.model.state_dict().items()}
    sparse.apply(first)
    assert all(torch.equal(mask, masks[name]) for name, mask in sparse.masks.items())
    assert all(torch.equal(tensor, state[name]) for name, tensor in sparse.model.state_dict().items())


@pytest.mark.parametrize(
    ("sparsity", "message"),
    [
        (0.5, "0.weight has 32 live weights, .* starts with 16 .*use initial_mask='magnitude'"),
        (0.875, "0.weight has 8 live weights, .* starts with 16 .*start the plan at a higher sparsity"),
        (0.0, "0.weight has 64 live weights"),
    ],
)
def test_as_is_refuses_a_model_that_is_denser_or_sparser_than_the_plan(sparsity: float, message: str) -> None:
    sparse = gp.SparseModel(four_layers(), sparsity=0.75, allocation="uniform")
    sparse.prune(to=sparsity)
    plan = gp.methods.static_random(
        gp.Partition.per_layer(sparse.model), sparsity=0.75, iterations=1, initial_mask="as_is"
    )
    with pytest.raises(gp.GrowpruneError, match=message):
        next(iter(Cursor(sparse, plan)))


def test_as_is_looks_at_each_layer_unless_all_are_ranked_together() -> None:
    uneven, together = (gp.SparseModel(four_layers(), sparsity=0.75, allocation=a) for a in ("uniform", "global"))
    for i, to in ((0, 0.5), (2, 63 / 64), (4, 0.75), (6, 49 / 64)):
        uneven.prune(Part("S", (f"{i}.weight",)), to=to)
    assert uneven.num_alive == 32 + 1 + 16 + 15
    with pytest.raises(gp.GrowpruneError, match=r"0.weight has 32 live weights.*use allocation='global'"):
        uneven.prune(to=0.75, by=By.AS_IS)
    together.restore(uneven.snapshot())
    together.prune(to=0.75, by=By.AS_IS)
    assert together.alive_by_weight() == uneven.alive_by_weight()


@pytest.mark.parametrize(
    "bad", [lambda: grow(Part("S", ("w",)), by=By.AS_IS), lambda: prune(Part("S", ("w",)), share=0.5, by=By.AS_IS)]
)
def test_only_a_prune_to_a_sparsity_can_go_by_what_is_there(bad: Any) -> None:
    with pytest.raises(gp.GrowpruneError, match="got by=as_is, which needs prune with to="):
        bad()


def test_a_recipe_sets_it_by_name() -> None:
    recipe = override(RECIPES["digits/tiny"](), {"options.initial_mask": "magnitude"})
    assert recipe.options["initial_mask"] == "magnitude"
    with pytest.raises(gp.GrowpruneError, match="must be one of random, magnitude, as_is, got gradient"):
        override(recipe, {"options.initial_mask": "gradient"})
