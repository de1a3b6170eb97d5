"""What a user says of a sparse training: plans as long as the training, parts, heads that stay dense."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from toy import Toy, cyclic

from growprune import Cursor, GrowpruneError, Partition, contiguous
from growprune.compare.rows import spend
from growprune.masks.inspection import output_layers
from growprune.methods import METHODS
from growprune.plan import declaration_of
from growprune.training.settings import FirstMask, Settings, describe

RANDOM = FirstMask("random")
FOUR = Partition.contiguous(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), 4)
BY_ONE_TRAINER = sorted(METHODS.keys() - {"parallel_gap", "parallel_gradual_gap", "snip", "grasp"})


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))


def asked(method: str, **given: Any) -> Settings:
    """Settings of a training to 0.75, some of them options of the method."""
    own = {name: value for name, value in given.items() if name in Settings.__dataclass_fields__}
    return Settings(method, 0.75, **own, options={name: given[name] for name in given if name not in own})


def cursor_of(settings: Settings, iterations: int) -> Cursor:
    model = make_model()
    return settings.resolve(model, iterations=iterations, iterations_per_epoch=7).cursor(model, None, None)


@pytest.mark.parametrize("iterations", [12, 101])
@pytest.mark.parametrize("name", BY_ONE_TRAINER)
def test_every_method_takes_the_whole_training_if_not_told_otherwise(name: str, iterations: int) -> None:
    cursor = cursor_of(asked(name), iterations)
    assert cursor.num_iterations == iterations
    assert cursor.sparse.allocation == declaration_of(METHODS[name]).allocation


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
    plan, per_epoch = asked("cyclic_gap", **options).plan_over(FOUR, RANDOM, iterations=120, iterations_per_epoch=12)
    assert plan.options == {"sparsity": 0.75, "initial_mask": "random", **expected}
    assert per_epoch == (12 if "epochs" in options or "finetune" in options else 1)


@pytest.mark.parametrize(("total", "lengths"), [(60, (8, 3, 36)), (20, (8, 1, 12)), (19, (4, 2, 11)), (8, (4, 1, 4))])
def test_lengths_are_those_of_a_comparison_of_as_many_epochs(total: int, lengths: tuple[int, ...]) -> None:
    filled = asked("cyclic_gap").plan_over(FOUR, RANDOM, iterations=total)[0].options
    recipe = replace(cyclic(), method=METHODS["cyclic_gap"], options={}, parts=contiguous(4), task=Toy(depth=5))
    assert tuple(filled[name] for name in ("steps", "epochs", "finetune")) == lengths
    assert tuple(spend(recipe, total, 4).options.values()) == lengths


@pytest.mark.parametrize(
    ("parts", "sizes"),
    [
        (None, (128, 128, 128, 64)),
        (3, (192, 192, 64)),
        ("contiguous", (128, 128, 128, 64)),
        ("contiguous(3)", (192, 192, 64)),
        ("balanced(3)", (192, 128, 128)),
        ("per_layer", (64,) * 7),
        (contiguous(2), (256, 192)),
        ([["0", "1"], ["2", "3", "4", "5", "6", "7"]], (128, 320)),  # the last layer stays dense
        (Partition.of(make_model(), [["0", "1"], ["2", "3", "4", "5", "6", "7"]]), (128, 320)),
    ],
)
def test_parts_are_those_of_the_method_or_those_that_are_asked_for(parts: Any, sizes: tuple[int, ...]) -> None:
    assert asked("cyclic_gap", parts=parts).cut(make_model(), ("7",)).sizes == sizes


def test_the_last_layer_of_a_model_stays_dense() -> None:
    assert output_layers(make_model())[0] == ("7",)
    assert output_layers(nn.Sequential(nn.Linear(4, 4)))[0] == ()  # there would be nothing left


def test_stairs_that_are_one_number_are_named() -> None:
    with pytest.raises(GrowpruneError, match=r"^stages must be a sequence of sparsities, .*, got 0.5$"):
        cursor_of(asked("iterative", stages=0.5), 9)


def test_a_method_that_draws_has_the_seed_of_the_training() -> None:
    plans = [asked("random_gap", seed=seed).plan_over(FOUR, RANDOM, iterations=120)[0] for seed in (0, 3)]
    assert [plan.options["seed"] for plan in plans] == [0, 3]


def test_the_line_at_the_start_says_what_is_pruned_and_what_is_not() -> None:
    """8 layers of 64 weights: one is frozen, and the last is the output."""
    model = make_model()
    model[1].requires_grad_(False)
    line = describe(asked("rigl", iterations=60).resolve(model), model)
    assert "60 iterations" in line
    assert "prunes 6 layers, 384 weights of 576 parameters" in line
    assert "peak density 0.25 " in line
    assert "7 (the layer registered last), 1.weight (frozen), 64 parameters of norms and biases" in line


@pytest.mark.parametrize(
    ("method", "peak"), [("gmp", 1.0), ("rigl", 0.25), ("cyclic_gap", 0.25 + 0.75 * 128 / 448), ("dense", 1.0)]
)
def test_the_peak_density_of_a_plan(method: str, peak: float) -> None:
    """The largest of four parts has 2 of 7 layers."""
    assert asked(method).resolve(make_model(), iterations=60).peak_density == pytest.approx(peak)
