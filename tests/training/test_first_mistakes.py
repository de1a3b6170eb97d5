"""What people do with `gp.sparsify` in odd but reasonable loops: it works, or one line says what to do."""

import copy
from typing import Any

import pytest
import torch
from plan_cases import adamw, check_same_bits, frozen, sgd, small_net, thawed, train_step
from torch import nn

import growprune as gp
from growprune.training.sparsifier import Sparsifier


def begun(model: nn.Module, **given: Any) -> tuple[Sparsifier, Any]:
    optimizer = sgd(model.parameters())
    return gp.sparsify(model, optimizer, **{"sparsity": 0.75, "iterations": 8, **given}), optimizer


# The first mask


def test_an_embedding_tied_to_the_head_is_no_sign_of_training() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.body, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32)
            self.head.weight = self.embedding.weight

    sparsifier, _ = begun(Tied())
    assert sparsifier.plan.options["initial_mask"] == "random"


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_first_edit_that_failed_leaves_a_plain_model(storage: str) -> None:
    model = small_net()
    with torch.no_grad():
        model[3].weight[:, 8:].zero_()
    with pytest.raises(gp.GrowpruneError, match="as_is"):
        begun(model, method="rigl", initial_mask="as_is", storage=storage)
    optimizer = sgd(model.parameters())
    for iteration in range(2):
        train_step(model, optimizer, iteration)
    assert model[3].weight.count_nonzero() > 0.9 * model[3].weight.numel()


def test_steps_without_gradients_are_named_if_weights_are_chosen_by_them() -> None:
    _, optimizer = begun(small_net(), method="rigl")
    with pytest.raises(gp.GrowpruneError, match="gradient"):
        optimizer.step()


# Optimizers


def test_an_optimizer_that_was_not_given_is_asked_for() -> None:
    """It would revive weights by its momentum."""
    model = small_net()
    with pytest.warns(UserWarning, match=r"the optimizer does not train 0\.weight \(1 of 2 weights"):
        gp.sparsify(model, adamw(model[3:].parameters()), sparsity=0.75, iterations=8)


def test_frozen_weights_need_no_optimizer() -> None:
    model = small_net()
    model[0].requires_grad_(requires_grad=False)
    sparsifier = gp.sparsify(model, adamw(model[3:].parameters()), sparsity=0.75, iterations=8)
    assert "0.weight" not in sparsifier.sparse.masks


# Models that others hold


def test_a_data_parallel_model_is_unwrapped() -> None:
    plain, _ = begun(small_net())
    wrapped, optimizer = begun(nn.DataParallel(small_net()))
    wrapped.load_state_dict(thawed(frozen(plain.state_dict()))[0])
    train_step(wrapped.model, optimizer, 0)
    assert list(wrapped.sparse.masks) == list(plain.sparse.masks)
    with pytest.raises(gp.GrowpruneError, match=r"storage='compact' .* DataParallel"):
        begun(nn.DataParallel(small_net()), storage="compact")


def test_a_compact_model_of_another_sparsifier_is_refused() -> None:
    first, optimizer = begun(small_net(), storage="compact")
    train_step(first.model, optimizer, 0)
    del optimizer
    with pytest.raises(gp.GrowpruneError, match=r"already belongs to another SparseModel \(storage='compact'\)"):
        begun(copy.deepcopy(first.model))


@pytest.mark.parametrize("method", ["snfs", "snip"])
def test_a_model_that_was_refused_with_a_method_can_be_given_with_another(method: str) -> None:
    model = small_net()
    with pytest.raises(gp.GrowpruneError, match=r"use storage='masked'|pass losses"):
        begun(model, method=method, storage="compact")
    begun(model, storage="compact")


# States


def test_a_state_of_a_model_with_other_shapes_is_refused_before_anything_is_changed() -> None:
    first, optimizer = begun(small_net())
    train_step(first.model, optimizer, 0)
    other = small_net()
    other[5] = nn.Linear(16, 7)
    second, _ = begun(other)
    before = frozen(second.state_dict())
    with pytest.raises(gp.GrowpruneError, match=r"5\.weight has shape \(4, 16\) in it, but \(7, 16\) here"):
        second.load_state_dict(first.state_dict())
    check_same_bits(second.state_dict(), thawed(before)[0])


# The share of live weights


def test_a_layer_with_most_of_a_large_model_is_said_to_be_dense_at_the_peak() -> None:
    model = nn.Sequential(nn.Linear(1000, 100), nn.Linear(100, 10_000), nn.Linear(10_000, 2))
    says = r"up to 92% of the prunable weights will be live .*1\.weight, with 91%\. Pass peak_density=0\.9182"
    with pytest.warns(UserWarning, match=says):
        sparsifier, _ = begun(model, sparsity=0.9)
    assert max(edit.within or 0 for phase in sparsifier.plan for edit in phase.edits) <= 0.9182
    model = nn.Sequential(nn.Linear(1000, 100), nn.Linear(100, 10_000), nn.Linear(10_000, 2))
    begun(model, sparsity=0.9, peak_density=0.9182)  # without a word, as for all other models


def test_a_large_model_of_equal_layers_is_made_sparse_without_a_word() -> None:
    model = nn.Sequential(*[nn.Linear(550, 550) for _ in range(4)], nn.Linear(550, 2))
    sparsifier, _ = begun(model, sparsity=0.5)  # 62.5 % are live at the peak, as four parts have it
    assert sparsifier.sparse.num_prunable > 1_000_000


# A model that was built sparse


def built(**settings: Any) -> gp.SparseModel:
    torch.manual_seed(0)
    return gp.sparse_init(small_net, sparsity=0.75, keep_dense=["5"], **settings)


def test_a_model_that_was_built_sparse_trains_as_with_a_cursor_made_by_hand() -> None:
    ours, theirs = built(), built()
    optimizer, other = sgd(ours.model.parameters()), sgd(theirs.model.parameters())
    sparsifier = gp.sparsify(ours, optimizer, "cyclic_gap", sparsity=0.75, parts=2, iterations=8)
    parts = gp.Partition.contiguous(theirs.model, 2, keep_dense=["5"])
    options = {**sparsifier.plan.options, "initial_mask": "random"}
    cursor = gp.Cursor(theirs, gp.methods.cyclic_gap(parts, **options), iterations_per_epoch=1, is_begun=True)
    cursor.attach(other)
    for iteration in range(8):
        train_step(ours.model, optimizer, iteration)
        train_step(theirs.model, other, iteration)
    assert sparsifier.sparse is ours
    assert sparsifier.is_finished
    check_same_bits(dict(ours.model.state_dict()), dict(theirs.model.state_dict()))


@pytest.mark.parametrize("method", ["gradual_gap", "rigl"])
def test_a_model_that_was_built_sparse_is_pruned_further_and_resumed(method: str) -> None:
    """In compact storage, where a state is loaded into a model that is built anew."""

    def make() -> tuple[Sparsifier, Any]:
        sparse = built(allocation="global" if method == "gradual_gap" else "erk")
        optimizer = sgd(sparse.model.parameters())
        target = 0.9 if method == "gradual_gap" else 0.75
        return gp.sparsify(sparse, optimizer, method, sparsity=target, iterations=8), optimizer

    whole, optimizer = make()
    assert whole.plan.options.get("start", 0.75) == 0.75
    for iteration in range(8):
        saved = frozen(whole.state_dict())
        train_step(whole.model, optimizer, iteration)
    again, other = make()
    again.load_state_dict(thawed(saved)[0])
    train_step(again.model, other, 7)
    check_same_bits(whole.state_dict(), again.state_dict())
    assert again.sparse.is_at_target
    assert again.is_finished


def test_settings_of_a_model_that_was_built_sparse_are_said_once() -> None:
    sparse = built()
    optimizer = sgd(sparse.model.parameters())
    with pytest.raises(gp.GrowpruneError, match=r"sparsify got seed=3, but the SparseModel has seed=0: set it only"):
        gp.sparsify(sparse, optimizer, "cyclic_gap", sparsity=0.75, iterations=8, seed=3)
    with pytest.raises(gp.GrowpruneError, match="gmp cannot start from a SparseModel"):
        gp.sparsify(sparse, optimizer, "gmp", sparsity=0.75, iterations=8)


@pytest.mark.parametrize("method", ["gradual_gap", "gmp", "static_random"])
def test_model_on_the_meta_device_is_refused(method: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    with pytest.raises(gp.GrowpruneError, match=r"0\.weight is on the meta device and has no values"):
        _, optimizer = begun(model, method=method)
        for _ in range(8):
            model(torch.zeros(2, 16, device="meta")).sum().backward()
            optimizer.step()
