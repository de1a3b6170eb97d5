"""Learning-rate curves as literal lists, and optimizers by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from growprune.engine.optim import OPTIMIZERS, LRSchedule, OptimizerConfig


def factors(lr_schedule: LRSchedule, total: int, per_epoch: int) -> list[float]:
    return [round(lr_schedule.factor(i, total=total, per_epoch=per_epoch), 4) for i in range(total)]


def test_cosine_falls_from_one_towards_zero() -> None:
    assert factors(LRSchedule("cosine"), 4, 2) == [1.0, 0.8536, 0.5, 0.1464]


def test_warmup_is_linear_and_the_cosine_fills_the_rest() -> None:
    assert factors(LRSchedule("cosine", warmup_epochs=2), 6, 1) == [0.5, 1.0, 1.0, 0.8536, 0.5, 0.1464]


def test_steps_come_at_shares_of_the_stretch() -> None:
    lr_schedule = LRSchedule("step", milestones=(0.5, 0.75), gamma=0.1)
    assert factors(lr_schedule, 8, 1) == [1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01]


def test_inverse_square_root_is_one_where_the_warmup_ends() -> None:
    lr_schedule = LRSchedule("inverse_sqrt", warmup_epochs=4)
    assert factors(lr_schedule, 8, 1) == [0.25, 0.5, 0.75, 1.0, 0.8944, 0.8165, 0.7559, 0.7071]


def test_constant_with_half_an_epoch_of_warmup() -> None:
    assert factors(LRSchedule("constant", warmup_epochs=0.5), 5, 4) == [0.5, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_is_built_with_decay_on_weights_only(kind: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = OptimizerConfig(kind, lr=0.5, weight_decay=0.25).build(model)
    assert isinstance(optimizer, OPTIMIZERS[kind])
    weights, others = optimizer.param_groups
    assert [p.shape for p in weights["params"]] == [torch.Size([2, 3])]
    assert len(others["params"]) == 3
    assert (weights["weight_decay"], others["weight_decay"], weights["lr"]) == (0.25, 0.0, 0.5)


def test_an_option_the_optimizer_does_not_know_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="optimizer adam does not take all of momentum"):
        OptimizerConfig("adam", momentum=0.9).build(nn.Linear(2, 2))


def test_options_that_torch_refuses_together_are_an_error_that_names_them() -> None:
    with pytest.raises(ValueError, match="optimizer sgd does not take all of nesterov: Nesterov momentum requires"):
        OptimizerConfig("sgd", nesterov=True).build(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "foo"}, "kind is 'foo', but must be one of sgd, adam, adamw, rmsprop, adagrad"),
        ({"lr": -1.0}, "lr is -1.0, but must be 0 or more"),
        ({"lr": float("nan")}, "lr is nan, but must be 0 or more"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1, but must be 0 or more"),
        ({"momentum": 1.0}, "momentum is 1.0, but must be from 0 to below 1"),
        ({"betas": (0.9, 1.0)}, r"betas is (0.9, 1.0), but must be from 0 to below 1, both"),
        ({"eps": 0.0}, "eps is 0.0, but must be above 0"),
    ],
)
def test_settings_no_optimizer_can_have_are_refused_when_they_are_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        OptimizerConfig(**settings)
    assert str(error.value) == message


def test_settings_at_the_edge_of_what_is_allowed_are_taken() -> None:
    settings = OptimizerConfig("adam", lr=0.0, weight_decay=0.0, momentum=0.0, betas=(0.0, 0.0), eps=1e-12)
    assert settings.lr == 0


def test_a_curve_of_no_known_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="shape is 'foo', but must be one of cosine, step, inverse_sqrt, constant"):
        LRSchedule("foo")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_epochs": -1}, "warmup_epochs is -1, but must be 0 or more"),
        ({"every_epochs": -2.0}, "every_epochs is -2.0, but must be 0 or more"),
        ({"milestones": (0.5, 30)}, "milestones is .*, but must be from 0 to 1, each"),
        ({"gamma": 0.0}, "gamma is 0.0, but must be above 0 and at most 1"),
        ({"floor": 2.0}, "floor is 2.0, but must be from 0 to 1"),
    ],
)
def test_a_curve_that_would_rise_or_never_end_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LRSchedule("step", **settings)
