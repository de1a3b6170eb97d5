"""Learning-rate curves as literal lists, and optimizers by name."""

from typing import Any

import pytest
import torch
from torch import nn

from growprune.engine.recipe import OPTIMIZERS, LRSchedule, OptimizerConfig


@pytest.mark.parametrize(
    ("lr_schedule", "per_epoch", "expected"),
    [
        (LRSchedule("cosine"), 2, [1.0, 0.8536, 0.5, 0.1464]),
        (LRSchedule("cosine", warmup_epochs=2), 1, [0.5, 1.0, 1.0, 0.8536, 0.5, 0.1464]),
        (LRSchedule("step", milestones=(0.5, 0.75)), 1, [1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01]),
        (LRSchedule("step", every_epochs=1, gamma=0.5, floor=0.2), 2, [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2]),
        (LRSchedule("inverse_sqrt", warmup_epochs=4), 1, [0.25, 0.5, 0.75, 1.0, 0.8944, 0.8165, 0.7559, 0.7071]),
        (LRSchedule("constant", warmup_epochs=0.5), 4, [0.5, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_a_curve_is_the_one_computed_by_hand(lr_schedule: LRSchedule, per_epoch: int, expected: list[float]) -> None:
    total = len(expected)
    assert [round(lr_schedule.factor(i, total=total, per_epoch=per_epoch), 4) for i in range(total)] == expected


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_is_built_with_decay_on_weights_only(kind: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = OptimizerConfig(kind, lr=0.5, weight_decay=0.25).build(model)
    assert isinstance(optimizer, OPTIMIZERS[kind])
    weights, others = optimizer.param_groups
    assert [p.shape for p in weights["params"]] == [torch.Size([2, 3])]
    assert len(others["params"]) == 3
    assert (weights["weight_decay"], others["weight_decay"], weights["lr"]) == (0.25, 0.0, 0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "adam", "momentum": 0.9}, "optimizer adam does not accept momentum"),
        ({"kind": "sgd", "nesterov": True}, "optimizer sgd does not accept nesterov: Nesterov momentum requires"),
    ],
)
def test_options_that_the_optimizer_refuses_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**settings).build(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "foo"}, "kind must be one of sgd, adam, adamw, rmsprop, adagrad, got 'foo'"),
        ({"lr": -1.0}, "lr must be >= 0, got -1.0"),
        ({"lr": float("nan")}, "lr must be >= 0, got nan"),
        ({"weight_decay": -0.1}, "weight_decay must be >= 0, got -0.1"),
        ({"momentum": 1.0}, "momentum must be in [0, 1), got 1.0"),
        ({"betas": (0.9, 1.0)}, r"betas must be in [0, 1) each, got (0.9, 1.0)"),
        ({"eps": 0.0}, "eps must be > 0, got 0.0"),
    ],
)
def test_settings_no_optimizer_can_have_are_refused_when_they_are_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        OptimizerConfig(**settings)
    assert str(error.value) == message


def test_settings_at_the_edge_of_what_is_allowed_are_taken() -> None:
    settings = OptimizerConfig("adam", lr=0.0, weight_decay=0.0, momentum=0.0, betas=(0.0, 0.0), eps=1e-12)
    assert settings.lr == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shape": "foo"}, "shape must be one of cosine, step, inverse_sqrt, constant, got 'foo'"),
        ({"warmup_epochs": -1}, "warmup_epochs must be >= 0, got -1"),
        ({"every_epochs": -2.0}, "every_epochs must be >= 0, got -2.0"),
        ({"milestones": (0.5, 30)}, "milestones must be in .* each, got \\(0.5, 30\\)"),
        ({"gamma": 0.0}, "gamma must be in \\(0, 1\\], got 0.0"),
        ({"floor": 2.0}, "floor must be in \\[0, 1\\], got 2.0"),
    ],
)
def test_a_curve_that_would_rise_or_never_end_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LRSchedule(**{"shape": "step", **settings})
