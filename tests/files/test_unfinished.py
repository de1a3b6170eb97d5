"""A model that is not at its target is saved with a warning: a method that prunes last would leave it dense."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import growprune as gp


def three_of_four_steps() -> tuple[gp.SparseModel, torch.optim.Optimizer]:
    model = nn.Linear(8, 8)
    sparse = gp.SparseModel(model, sparsity=0.75, allocation="global")
    plan = gp.methods.dpf(gp.Partition.contiguous(model, 1), sparsity=0.75, iterations=4, every=1)
    optimizer = gp.Cursor(sparse, plan).attach(torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(3):
        step(model, optimizer)
    return sparse, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


def test_a_model_that_is_saved_a_step_too_early_is_warned_of(tmp_path: Path) -> None:
    """As where a GradScaler has skipped a step of four: DPF prunes only after the last."""
    sparse, _optimizer = three_of_four_steps()
    assert sparse.num_alive == 64
    with pytest.warns(UserWarning, match=r"^the saved model is not at its target .* 0\.75: its plan is not over"):
        gp.save(sparse, tmp_path / "model.safetensors")


@pytest.mark.parametrize("kind", ["SparseModel", "module"])
def test_a_model_that_is_deployed_a_step_too_early_is_warned_of(kind: str) -> None:
    sparse, _optimizer = three_of_four_steps()
    sparse.apply(gp.prune(gp.Part("all", ("weight",)), to=0.5))
    with pytest.warns(UserWarning, match=r"^the deployed model is not at its target .* 0\.75: its plan is not over"):
        gp.deploy(sparse if kind == "SparseModel" else sparse.model, torch.ones(2, 8), seconds=0)


def test_a_line_that_saves_many_times_is_warned_of_once(tmp_path: Path) -> None:
    sparse, _optimizer = three_of_four_steps()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            gp.save(sparse, tmp_path / "model.safetensors")
    assert len(told) == 1


def test_a_plan_that_is_over_or_a_model_at_its_sparsity_is_saved_quietly(tmp_path: Path) -> None:
    sparse, _optimizer = three_of_four_steps()
    early = copy.deepcopy(sparse)
    sparse.prune()
    gp.save(sparse, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"^the saved model has sparsity 0, not at its target sparsity of 0\.75"):
        gp.save(early, tmp_path / "early.safetensors")  # a clone is in no plan, so it must be pruned
    sparse, optimizer = three_of_four_steps()
    step(sparse.model, optimizer)
    gp.save(sparse, tmp_path / "model.safetensors")
    assert sparse.num_alive == 16


def test_a_model_whose_plan_was_never_begun_is_warned_of(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    sparse = gp.SparseModel(model, sparsity=0.75, allocation="global")
    _cursor = gp.Cursor(sparse, gp.methods.gmp(gp.Partition.contiguous(model, 1), sparsity=0.75, iterations=2))
    with pytest.warns(UserWarning, match=r"its plan never began. Call cursor.attach\(optimizer\) before"):
        gp.save(sparse, tmp_path / "model.safetensors")
