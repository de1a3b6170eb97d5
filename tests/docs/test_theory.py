"""The experiments of docs/theory.md and experiments/theory, in the small, against what can be worked out by hand."""

import json
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch
from paths import ROOT
from torch import nn

import growprune as gp
from growprune.sparse.cursor import Cursor

THEORY = ROOT / "experiments" / "theory"
SMALLEST = {
    "ten_weights": ["--seeds", "2"],
    "explored": ["--seeds", "1", "--epochs", "8", "--width", "4"],
    "mask_error": ["--seeds", "1", "--epochs", "1", "--rounds", "1", "--width", "2"],
    "proposition": ["--seeds", "1", "--rounds", "1", "2"],
    "live_weights": ["--seeds", "1", "--epochs", "8", "--width", "2", "--sparsities", "0.8"],
    "growth": ["--seeds", "1", "--iterations", "8", "--every", "2"],
    "growth characters": [
        *("--seeds", "1", "--iterations", "8", "--every", "2"),
        *("--task", "characters", "--data", "TEXT"),
    ],
    "rise": ["--seeds", "1", "--iterations", "8"],
    "initial_weights": ["--seeds", "1", "--iterations", "2"],
    "rise characters": [
        *("--seeds", "1", "--iterations", "8", "--sparsity", "0.7"),
        *("--task", "characters", "--data", "TEXT"),
    ],
}
"""By the name of the script: arguments with which it takes a second or two."""
SHARED = {"common", "deep_tasks", "digits", "draw", "paired"}


@pytest.fixture(autouse=True)
def _find_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(THEORY))


# Ten weights


def test_the_coupon_collector_of_ten_weights_needs_29_steps() -> None:
    from ten_weights import expected_random, expected_random_but_the_last

    assert expected_random(10) == pytest.approx(29.28968253968254)  # 10 (1 + 1/2 + ... + 1/10)
    assert expected_random(2) == 3  # 1, then 2 on average
    assert expected_random_but_the_last(10) == pytest.approx(26.46071428571429)  # 1 + 9 (1 + 1/2 + ... + 1/9)
    assert expected_random_but_the_last(2) == 2  # the second draw must be the other one


def test_cyclic_gap_trains_each_of_ten_weights_in_exactly_ten_steps() -> None:
    from ten_weights import cyclic

    assert [cyclic(seed) for seed in range(3)] == [10, 10, 10]


def test_random_exploration_takes_as_long_as_the_coupon_collector() -> None:
    from ten_weights import random_weights

    steps = [random_weights(seed) for seed in range(30)]
    assert min(steps) >= 10
    assert abs(sum(steps) / 30 - 29.29) < 3 * 11.2 / math.sqrt(30)  # 11.2: the coupon collector's standard deviation


# Coverage


def three_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(10, 1, bias=False) for _ in range(3)))


def shares_seen(sparse: gp.SparseModel, plan: gp.Plan) -> list[float]:
    from common import Ever

    ever = Ever(sparse)
    return [ever.look() for _ in Cursor(sparse, plan)]


def test_cyclic_gap_has_seen_every_weight_after_kappa_steps_and_not_before() -> None:
    model = three_layers()
    plan = gp.methods.cyclic_gap(gp.Partition.per_layer(model), sparsity=0.9, steps=4, epochs=1, finetune=1)
    seen = shares_seen(gp.SparseModel(model, sparsity=0.9), plan)
    assert seen == [3 / 30, 12 / 30, 21 / 30, 1, 1, 1]


def test_a_static_mask_sees_its_own_weights_only_and_gmp_all_at_once() -> None:
    model = three_layers()
    S = gp.Partition.per_layer(model)
    static = gp.methods.static_random(S, sparsity=0.9, iterations=4)
    assert shares_seen(gp.SparseModel(model, sparsity=0.9, allocation="uniform"), static) == [0.1]
    gmp = gp.methods.gmp(S, sparsity=0.9, iterations=8, every=2)
    assert set(shares_seen(gp.SparseModel(model, sparsity=0.9, allocation="uniform"), gmp)) == {1.0}


def test_set_sees_as_many_weights_as_chance_says() -> None:
    from explored import expected_set

    model = nn.Linear(10, 1, bias=False)
    plan = gp.methods.set_(
        gp.Partition.contiguous(model, 1), sparsity=0.8, iterations=2, every=1, drop=1.0, until=1.0
    )  # one swap, of half of the two live weights
    expected = 1 - 8 / 10 * (1 - 1 / 9)  # one of nine dead ones grows
    assert expected_set(plan, num_weights=10, num_live=2) == pytest.approx(expected)
    models = (gp.SparseModel(model, sparsity=0.8, allocation="uniform", seed=seed) for seed in range(200))
    seen = [shares_seen(sparse, plan)[-1] for sparse in models]
    assert set(seen) == {0.2, 0.3}
    assert abs(sum(seen) / 200 - expected) < 3 * 0.1 * math.sqrt(1 / 9 * 8 / 9 / 200)


# The mask-incurred error


def test_the_mask_error_is_the_share_of_squares_that_the_mask_hides() -> None:
    from mask_error import mask_error

    weights = {"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([2.0, -1.0, 1.0])}
    masks = {"a": torch.tensor([True, False]), "b": torch.tensor([True, False, False])}
    assert mask_error(weights, masks) == 3 / 16
    assert mask_error(weights, masks, ["b"]) == 2 / 6


def test_the_mask_error_of_a_step_is_of_the_weights_just_before_its_pruning() -> None:
    from mask_error import MaskErrors

    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False))
    sparse = gp.SparseModel(model, sparsity=0.5)
    S = gp.Partition.per_layer(model)
    plan = gp.methods.cyclic_gap(S, sparsity=0.5, steps=2, epochs=1, finetune=0)
    errors = MaskErrors(sparse)
    cursor = gp.Cursor(sparse, plan, on_enter=errors.after_edits, on_leave=errors.before_edits)
    grown = iter((None, (0, [3.0, -1.0]), (1, [1.0, 2.0]), None))
    for _, values in zip(cursor, grown, strict=False):
        if values is None:  # a random mask of one weight each, which becomes 1
            for layer in model:
                layer.weight.data.copy_(sparse.masks["0.weight" if layer is model[0] else "1.weight"].float())
        else:
            model[values[0]].weight.data.copy_(torch.tensor([values[1]]))
    assert errors.part == [pytest.approx(1 / 10), pytest.approx(1 / 5)]
    assert errors.whole == [pytest.approx(1 / (10 + 1)), pytest.approx(1 / (9 + 5))]


# Proposition 1


def test_the_gradient_counts_dead_weights_too() -> None:
    from proposition import Blocks, Problem

    model = Blocks(2, kappa=2).double()
    for part, value in zip(model.parts, (1.0, 0.0), strict=True):
        part.weight.data.fill_(value)
    x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    problem = Problem(model, x, torch.tensor([[4.0]], dtype=torch.float64), smoothness=1.0)
    assert problem.squared_gradient() == 45  # the residual is 1 - 4 = -3, so the gradient is (-3, -6)


@pytest.mark.parametrize(("is_proof", "expected"), [(True, [3.0, 1.0]), (False, [3.0, 0.0])])
def test_in_the_proof_a_pruned_weight_comes_back_and_in_practice_it_starts_from_zero(
    is_proof: bool, expected: list[float]
) -> None:
    from proposition import Follower, linear

    problem = linear(kappa=2, tail=0.0, seed=0, num_inputs=4, num_samples=8)
    follower = Follower(problem, 0.5, 2, 1, is_proof=is_proof, rate=0.5, seed=0)
    for step, _ in enumerate(follower.cursor):
        if step == 1:  # the first part has grown
            problem.model.parts[0].weight.data.copy_(torch.tensor([[3.0, 1.0]]))
        if step == 2:
            assert problem.model.parts[0].weight.tolist() == [[3.0, 0.0]]
        if step == 3:  # it grows again
            assert problem.model.parts[0].weight.tolist() == [expected]


def test_in_the_proof_only_the_part_in_turn_is_trained() -> None:
    from proposition import Follower, linear

    problem = linear(kappa=2, tail=0.0, seed=0, num_inputs=4, num_samples=8)
    second = problem.model.parts[1].weight.detach().clone()
    follower = Follower(problem, 0.0, 1, 1, is_proof=True, rate=0.5, seed=0)
    seen = []
    follower.cursor._on_leave = lambda scheduled: seen.append(problem.model.parts[1].weight.detach().clone())
    follower.follow()
    assert torch.equal(seen[1], second) and not torch.equal(seen[2], second)  # after the first step, and the second


def test_the_gradient_falls_with_more_rounds_to_a_floor_ordered_by_delta() -> None:
    from proposition import Follower, linear

    ends, deltas = [], []
    for sparsity, tail in ((0.0, 0.0), (0.875, 1.0), (0.5, 0.0), (0.875, 0.0)):
        follower = Follower(linear(4, tail, seed=0), sparsity, 64, 1, is_proof=True, rate=1.0, seed=0)
        averages = follower.follow()
        quarters = [sum(follower.gradients[i : i + 16]) / 16 for i in range(0, 64, 16)]
        assert quarters[0] > quarters[-1] and averages["gradient"] == pytest.approx(sum(quarters) / 4)
        ends.append(quarters[-1])
        deltas.append(sum(follower.errors[-64:]) / 64)
    assert deltas[0] == 0 and deltas == sorted(deltas)
    assert ends == sorted(ends)  # not by sparsity: what falls steeply loses less at 0.875 than what is even at 0.5


# What the experiments share


def test_plans_that_grow_and_plans_that_do_not_hold_equally_much_at_their_peak() -> None:
    from deep_tasks import DeepDigits
    from growth import arms, peak_density

    task = DeepDigits(width=16)
    S = gp.Partition.per_layer(task.build_model())
    plans = arms(task, 40, 4, 0.9, 0.7)
    peaks = {name: peak_density(plan(S, 0), task.build_model(), 0.9) for name, plan in plans.items()}
    growing = peaks["rising, growing random layers"]
    assert growing > 0.31
    assert peaks["rising, never growing, equal peak"] == pytest.approx(growing, abs=0.01)
    assert peaks["rising, never growing, equal start"] == pytest.approx(0.3, abs=0.01)
    assert peaks["never growing, from dense (GMP)"] == 1


# The scripts and the page


def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches in an epoch instead of nineteen."""
    import digits

    from growprune.tasks import digits as task

    whole = task._load()
    monkeypatch.setattr(task, "_load", lambda: {name: (x[:128], y[:128]) for name, (x, y) in whole.items()})
    monkeypatch.setattr(digits, "PER_EPOCH", 2)


@pytest.mark.parametrize("name", SMALLEST)
def test_the_smallest_form_of_every_experiment_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few_digits(monkeypatch)
    (tmp_path / "text").write_text("to be or not to be, that is the question. " * 500)
    script = THEORY / f"{name.split()[0]}.py"
    arguments = [str(tmp_path / "text") if a == "TEXT" else a for a in SMALLEST[name]]
    monkeypatch.setattr(sys, "argv", [str(script), *arguments, "--out", str(tmp_path / "out.json")])
    runpy.run_path(str(script), run_name="__main__")
    assert "|---|" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["rows"]


def test_every_experiment_has_its_command_on_the_page_and_its_figures_in_the_repository() -> None:
    page = (ROOT / "docs" / "theory.md").read_text() + (THEORY / "README.md").read_text()
    scripts = {path.stem for path in THEORY.glob("*.py")} - SHARED
    assert scripts == {name.split()[0] for name in SMALLEST}
    for name in scripts:
        assert f"python experiments/theory/{name}.py" in page
        assert json.loads((THEORY / f"{name}.json").read_text())["rows"]


def test_the_charts_show_the_figures_that_are_kept() -> None:
    import draw

    for name in ("explored", "mask_error", "proposition"):
        found = json.loads((THEORY / f"{name}.json").read_text())
        assert (THEORY / f"{name}.svg").read_text() == getattr(draw, name)(found), "run experiments/theory/draw.py"
        assert f"]({name}.svg)" in (THEORY / "README.md").read_text()


def test_the_table_of_initial_weights_is_that_of_its_figures() -> None:
    from initial_weights import by_model

    rows = json.loads((THEORY / "initial_weights.json").read_text())["rows"]
    assert by_model(rows) in (ROOT / "docs" / "theory.md").read_text()
