"""What the integrations share: plans as long as the training, heads that stay dense, and figures."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from toy import Toy, cyclic

from growprune import Cursor, GrowpruneError, Partition, SparseModel, contiguous, methods
from growprune.compare.budget import spend
from growprune.integrations.averages import Copies
from growprune.integrations.callback import Figures
from growprune.integrations.common import Settings, heads
from growprune.methods import METHODS
from growprune.sparse.internals import internals

BY_ONE_TRAINER = sorted(METHODS.keys() - {"parallel_gap", "parallel_gradual_gap", "snip", "grasp"})


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))


@pytest.mark.parametrize("iterations", [12, 101])
@pytest.mark.parametrize("name", BY_ONE_TRAINER)
def test_every_method_takes_the_whole_training_if_not_told_otherwise(name: str, iterations: int) -> None:
    settings = Settings(name, 0.75)
    cursor = settings.cursor(make_model(), iterations=iterations, iterations_per_epoch=7, remedy=str)
    assert sum(cursor.length_of(scheduled.phase) for scheduled in cursor.schedule) == iterations
    assert internals(cursor.sparse).allocation == METHODS[name].allocation  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"steps": 8, "epochs": 6, "finetune": 72}),  # in optimizer steps: two rounds in about two fifths
        ({"epochs": 1}, {"steps": 4, "epochs": 1, "finetune": 6}),  # in epochs, too few for two rounds
        ({"finetune": 2}, {"steps": 4, "epochs": 2, "finetune": 2}),
        ({"steps": 6}, {"steps": 6, "epochs": 8, "finetune": 72}),
    ],
)
def test_lengths_that_are_not_given_are_filled_in(options: dict[str, int], expected: dict[str, int]) -> None:
    filled, per_epoch = Settings("cyclic_gap", 0.75, options=options).resolved(4, 120, 12)
    assert filled == {"sparsity": 0.75, **expected}
    assert per_epoch == (12 if "epochs" in options or "finetune" in options else 1)


@pytest.mark.parametrize(("total", "lengths"), [(60, (8, 3, 36)), (20, (8, 1, 12)), (19, (4, 2, 11)), (8, (4, 1, 4))])
def test_lengths_are_those_of_a_comparison_of_as_many_epochs(total: int, lengths: tuple[int, ...]) -> None:
    filled, _ = Settings("cyclic_gap", 0.75).resolved(4, total, None)
    recipe = replace(cyclic(), method=METHODS["cyclic_gap"], options={}, partition=contiguous(4), task=Toy(depth=5))
    assert tuple(filled[name] for name in ("steps", "epochs", "finetune")) == lengths
    assert tuple(spend(recipe, total, 4).options.values()) == lengths


@pytest.mark.parametrize(
    ("partition", "sizes"),
    [
        (None, (192, 192, 64)),
        ("contiguous", (192, 192, 64)),
        ("balanced", (192, 128, 128)),
        ("per_layer", (64,) * 7),
        (contiguous(2), (256, 192)),
        ([["0", "1"], ["2", "3", "4", "5", "6", "7"]], (128, 384)),
    ],
)
def test_a_partition_is_the_methods_own_or_the_one_that_is_asked_for(partition: object, sizes: tuple[int, ...]) -> None:
    settings = Settings("cyclic_gap", 0.75, kappa=3, partition=partition)  # type: ignore[arg-type]
    model = make_model()
    assert settings.cut(model).sizes == sizes


def test_the_last_layer_of_a_model_stays_dense() -> None:
    assert heads(make_model()) == ("7",)
    assert heads(nn.Sequential(nn.Linear(4, 4))) == ()  # there would be nothing left


def test_churn_is_the_share_of_the_live_weights_that_were_dead() -> None:
    model = nn.Linear(4, 4)
    parts = Partition.contiguous(model, 1)
    cursor = Cursor(SparseModel(model, sparsity=0.5), methods.dense(parts, epochs=1))
    cursor.sparse.prune()
    figures = Figures(cursor)
    assert figures.read() == {"sparsity": 0.5, "live_weights": 8, "phase": -1, "churn": 0.0}
    cursor.sparse.grow(to=0.375)  # two more
    assert figures.read()["churn"] == 0.2
    assert figures.read()["churn"] == 0.0


def test_copies_and_churn_follow_a_rule_that_changes_masks_without_an_edit() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    sparse, average = SparseModel(model, sparsity=0.8, allocation="erk"), copy.deepcopy(model)
    plan = methods.deepr(Partition.contiguous(model, 1), sparsity=0.8, iterations=40, l1=1e-3, temperature=1e-3)
    cursor, copies = Cursor(sparse, plan), Copies()
    optimizer = cursor.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    copies.add(average)
    figures, before = Figures(cursor), sparse.masks
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for mine, its in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.1)
        copies.follow(sparse, [])
    born = sum(int((mask & ~before[name]).sum()) for name, mask in sparse.masks.items())
    assert born > 0
    assert figures.read()["churn"] == born / sparse.num_alive
    for name, mask in sparse.masks.items():
        assert not average.get_parameter(name)[~mask].any()


def test_figures_build_no_state_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is dense in compact storage, and of a sharded model something that all processes would have to ask for."""
    model = nn.Linear(4, 4)
    cursor = Cursor(SparseModel(model, sparsity=0.5), methods.dense(Partition.contiguous(model, 1), epochs=1))
    monkeypatch.setattr(
        internals(cursor.sparse).gradients, "state_dict", lambda: pytest.fail("the state was asked for")
    )
    figures = Figures(cursor)
    cursor.sparse.prune()
    assert figures.read()["sparsity"] == 0.5


@pytest.mark.parametrize("name", ["steps", "epochs", "finetune"])
def test_a_length_that_is_no_number_is_named(name: str) -> None:
    with pytest.raises(GrowpruneError, match=f"^{name} is '2', but must be a whole number of at least 0$"):
        Settings("cyclic_gap", 0.75, options={name: "2"}).resolved(4, 120, 12)


def test_stairs_that_are_one_number_are_named() -> None:
    with pytest.raises(GrowpruneError, match=r"^stages is 0.5, but must be several stairs, such as \(0.5, 0.7\)$"):
        Settings("iterative", 0.75, options={"stages": 0.5}).cursor(
            make_model(), iterations=9, iterations_per_epoch=3, remedy=str
        )


def test_a_method_that_draws_has_the_seed_of_the_callback() -> None:
    plans = [Settings("random_gap", 0.75, seed=seed).resolved(4, 120, 12)[0]["seed"] for seed in (0, 3)]
    assert plans == [0, 3]
