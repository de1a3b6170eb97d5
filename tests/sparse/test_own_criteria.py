"""Criteria of the user's own: functions of (weight) or (weight, gradient)."""

from typing import Any

import pytest
import torch
from plan_cases import small_net, train_step
from torch import Tensor, nn

import growprune as gp
from growprune import By, Cursor, GrowpruneError, Partition, Phase, SparseModel, grow, prune
from growprune.plan import onward, walk


def size(weight: Tensor) -> Tensor:
    return weight.abs()


def size_of_gradient(weight: Tensor, gradient: Tensor) -> Tensor:
    del weight
    return gradient.abs()


def test_scores_with_signs_decide_and_the_highest_stay() -> None:
    model = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-3.0, 1.0, -2.0, 0.5]]))
    sparse = SparseModel(model, sparsity=0.5)
    sparse.prune(by=lambda weight: weight)  # the most positive
    assert model.weight.tolist() == [[0, 1, 0, 0.5]]


@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.parametrize("allocation", ["uniform", "erk", "global"])
@pytest.mark.parametrize("pattern", ["unstructured", "1x4", "2:4"])
def test_own_magnitude_gives_the_masks_of_magnitude(storage: str, allocation: str, pattern: str) -> None:
    masks = []
    for by in (By.MAGNITUDE, size):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        sparse = SparseModel(model, sparsity=0.75, storage=storage, allocation=allocation, pattern=pattern)
        sparse.prune(to=0.6, by=by)
        sparse.prune(share=0.1, by=by)
        masks.append(sparse.masks)
    assert all(torch.equal(mask, masks[1][name]) for name, mask in masks[0].items())


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_own_gradient_trains_as_rigl_does_and_resumes(storage: str) -> None:
    def run(by: Any, *, resume: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = small_net()
        S = Partition.per_layer(model)
        swap = prune(S.whole, share=0.3), grow(S.whole, to=0.75, by=by)
        plan = [Phase(prune(S.whole, to=0.75), iterations=3), Phase(*swap, iterations=3), Phase(*swap, iterations=2)]
        sparse = SparseModel(model, sparsity=0.75, storage=storage)
        optimizer = (cursor := Cursor(sparse, plan)).attach(torch.optim.SGD(model.parameters(), 0.1))
        for iteration in range(8):
            if resume and iteration == 5:
                states = sparse.state_dict(), model.state_dict(), cursor.state_dict()
                model = small_net()
                sparse = SparseModel(model, sparsity=0.75, storage=storage)
                sparse.load_state_dict(states[0])
                model.load_state_dict(states[1])
                cursor = Cursor(sparse, plan)
                cursor.load_state_dict(states[2])
                optimizer = cursor.attach(torch.optim.SGD(model.parameters(), 0.1))
            train_step(model, optimizer, iteration, batches=1)
        return sparse.masks, {name: p.detach().clone() for name, p in model.named_parameters()}

    expected = run(By.GRADIENT)
    for found in (run(size_of_gradient), run(size_of_gradient, resume=True)):
        for mine, its in zip(expected, found, strict=True):
            assert all(torch.equal(tensor, its[name]) for name, tensor in mine.items())


def test_function_is_called_once_a_parameter_and_may_change_what_it_gets() -> None:
    seen = []

    def spoiling(weight: Tensor) -> Tensor:
        seen.append(tuple(weight.shape))
        return weight.abs_().add_(1)

    sparse = SparseModel(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)), sparsity=0.5, allocation="global")
    before = sparse.model[0].weight.clone()
    sparse.prune(by=spoiling)
    assert seen == [(4, 8), (8, 4)]
    mask = sparse.masks["0.weight"]
    assert torch.equal(sparse.model[0].weight[mask], before[mask])


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda weight: weight[0], r"\(4,\)"),
        (lambda weight: weight.abs() > 1, "torch.bool"),
        (lambda weight: weight.tolist(), "a list"),
        (lambda weight: weight * float("nan"), "NaN or infinity"),
    ],
)
def test_wrong_scores_are_refused_before_anything_changes(returned: Any, says: str) -> None:
    def mine(weight: Tensor) -> Any:
        return returned(weight) if len(weight) == 2 else weight.abs()

    sparse = SparseModel(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)), sparsity=0.5)
    with pytest.raises(GrowpruneError, match=f"mine.*1.weight, got .*{says}"):
        sparse.prune(by=mine)
    assert sparse.num_alive == 16


@pytest.mark.parametrize("function", [lambda: 0, lambda a, b, c: a, lambda *, weight: weight])
def test_functions_of_other_parameters_are_refused(function: Any) -> None:
    with pytest.raises(GrowpruneError, match=r"by must be a function of \(weight\) or \(weight, gradient\)"):
        prune(gp.Part("A", ("a",)), to=0.5, by=function)


def test_name_of_the_function_shows_and_takes_part_in_the_digest_of_a_plan() -> None:
    part = gp.Part("A", ("a",))
    edits = [prune(part, to=0.5, by=by) for by in (size, By.MAGNITUDE, size_of_gradient, By.GRADIENT)]
    assert [str(edit) for edit in edits[:2]] == ["prune A to 0.5 by size()", "prune A to 0.5"]
    digests = {onward("", walk([Phase(edit, iterations=1)])[0]) for edit in edits}
    assert len(digests) == 4
    again = prune(part, to=0.5, by=size)
    assert onward("", walk([Phase(again, iterations=1)])[0]) in digests
    assert [edit.by.needs_gradients for edit in edits] == [False, False, True, True]
