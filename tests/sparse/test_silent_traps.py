"""Mistakes that used to give a wrong model without a word: each is refused, or said in one line."""

from pathlib import Path

import pytest
import torch
from plan_cases import sgd, small_net, train_step
from torch import nn

import growprune as gp
from growprune.methods import gmp, gradual_gap


def planned(model: nn.Module, sparsity: float = 0.9) -> tuple[gp.SparseModel, gp.Plan]:
    sparse = gp.SparseModel(model, sparsity, allocation="global")
    return sparse, gradual_gap(gp.Partition.balanced(model, 2), sparsity=sparsity, iterations=20)


# A plan that never moves


def test_a_model_whose_plan_was_never_begun_is_not_saved_in_silence(tmp_path: Path) -> None:
    model = small_net()
    sparse, plan = planned(model)
    cursor = gp.Cursor(sparse, plan)
    optimizer = sgd(model.parameters())  # cursor.attach is forgotten
    with pytest.raises(gp.GrowpruneError, match="the plan has not begun"):
        train_step(model, optimizer, 0)
    for save in (
        lambda: gp.save(sparse, tmp_path / "model.safetensors"),
        lambda: gp.save_pretrained(sparse, tmp_path / "folder"),
    ):
        with pytest.warns(UserWarning, match=r"its plan never began. Call cursor.attach\(optimizer\)"):
            save()
    del cursor


def test_a_plan_that_is_made_after_the_optimizer_was_attached_is_waited_for_too() -> None:
    model = small_net()
    sparse, plan = planned(model)
    optimizer = sparse.attach(sgd(model.parameters()))
    train_step(model, optimizer, 0)
    cursor = gp.Cursor(sparse, plan)
    with pytest.raises(gp.GrowpruneError, match="the plan has not begun"):
        train_step(model, optimizer, 1)
    assert next(iter(cursor)).edits
    train_step(model, optimizer, 1)


def test_a_model_without_a_plan_that_nobody_pruned_is_not_saved_in_silence(tmp_path: Path) -> None:
    model = small_net()
    sparse = gp.SparseModel(model, 0.9)
    train_step(model, sparse.attach(sgd(model.parameters())), 0)
    with pytest.warns(UserWarning, match=r"has sparsity 0, not at its target sparsity of 0.9: call sparse.prune"):
        gp.save(sparse, tmp_path / "model.safetensors")
    sparse.prune()
    gp.save(sparse, tmp_path / "model.safetensors")


# What the model has, and what was asked for


def test_sparsity_is_that_of_the_model_now_and_cannot_be_set() -> None:
    sparse = gp.SparseModel(small_net(), 0.9)
    assert (sparse.sparsity, sparse.target_sparsity) == (0.0, 0.9)
    sparse.prune(to=0.5)
    assert (sparse.sparsity, sparse.target_sparsity) == (0.5, 0.9)
    with pytest.raises(AttributeError):
        sparse.sparsity = 0.8  # type: ignore[misc]


# Zeros that would be revived


def zeros(model: nn.Module) -> int:
    return sum(int((p == 0).sum()) for p in model.parameters() if p.ndim > 1)


def test_zeros_of_a_pruned_model_are_not_revived_in_silence() -> None:
    model = small_net()
    gp.SparseModel(model, 0.9).prune()
    state = model.state_dict()
    again = small_net()
    again.load_state_dict(state)  # somewhere else, into a plain model
    before = zeros(again)
    optimizer = gp.SparseModel(again, 0.9).attach(sgd(again.parameters()))
    with pytest.warns(UserWarning, match=r"0\.9\d* of the model's weights are zero"):
        train_step(again, optimizer, 0)
    train_step(again, optimizer, 1)  # said once
    third = small_net()
    third.load_state_dict(state)
    sparse = gp.SparseModel.from_zeros(third)
    optimizer = sparse.attach(sgd(third.parameters()))
    for iteration in range(5):
        train_step(third, optimizer, iteration)
    assert zeros(third) == before


def test_a_dense_model_and_one_pruned_before_it_is_attached_are_no_reason_to_warn() -> None:
    model = small_net()
    sparse = gp.SparseModel(model, 0.9)
    sparse.prune()
    train_step(model, sparse.attach(sgd(model.parameters())), 0)
    dense = small_net()
    train_step(dense, gp.SparseModel(dense, 0.9).attach(sgd(dense.parameters())), 0)


# Plans for another model


def test_a_plan_for_another_sparsity_is_refused_when_the_cursor_is_made() -> None:
    model = small_net()
    sparse, _ = planned(model, 0.8)
    _, plan = planned(small_net(), 0.9)
    with pytest.raises(gp.GrowpruneError, match=r"gradual_gap has sparsity=0\.9, but the SparseModel has 0\.8"):
        gp.Cursor(sparse, plan)


def test_a_plan_meant_for_another_allocation_than_the_default_is_refused() -> None:
    model = small_net()
    plan = gmp(gp.Partition.contiguous(model, 1), sparsity=0.9, iterations=20)
    with pytest.raises(gp.GrowpruneError, match=r"gmp is designed for allocation='global'"):
        gp.Cursor(gp.SparseModel(model, 0.9), plan)
    gp.Cursor(gp.SparseModel(model, 0.9, allocation="uniform"), plan)  # the user means it


def test_a_partition_with_other_dense_layers_than_the_model_is_refused() -> None:
    model = small_net()
    sparse = gp.SparseModel(model, 0.9, allocation="global", keep_dense=["5"])
    plan = gradual_gap(gp.Partition.balanced(model, 2), sparsity=0.9, iterations=20)
    with pytest.raises(gp.GrowpruneError, match=r"has 1,504 prunable weights, but the SparseModel has 1,440"):
        gp.Cursor(sparse, plan)
    by_hand = gp.Partition.of(model, [["0"], ["3", "5"]], keep_dense=["5"])
    gp.Cursor(sparse, gradual_gap(by_hand, sparsity=0.9, iterations=20))


def test_a_model_that_was_compiled_is_made_sparse_inside() -> None:
    compiled = torch.compile(small_net(), backend="eager")
    sparsifier = gp.sparsify(compiled, sgd(compiled.parameters()), sparsity=0.9, iterations=4)  # type: ignore[arg-type]
    assert list(sparsifier.sparse.masks) == ["0.weight", "3.weight"]
