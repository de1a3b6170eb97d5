"""Settings for optimizers and learning-rate schedules, and checks of settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import nn

from growprune.errors import GrowpruneError
from growprune.masks.layers import dense_shape

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


FUSED = ("sgd", "adam", "adamw")
"""Optimizers with a fused kernel on GPUs."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer of a recipe, and its settings."""

    kind: str = "sgd"
    """A name in `OPTIMIZERS`."""
    lr: float = 0.1
    """The peak of the learning-rate schedule."""
    weight_decay: float = 0.0
    """Applies to weights only, not to norms and biases."""
    momentum: float | None = None
    """For sgd and rmsprop."""
    nesterov: bool = False
    """For sgd."""
    betas: tuple[float, float] | None = None
    """For adam and adamw."""
    eps: float | None = None
    """For all but sgd."""

    def __post_init__(self) -> None:
        require(self.kind in OPTIMIZERS, "kind", self.kind, f"one of {', '.join(OPTIMIZERS)}")
        require(0 <= self.lr < math.inf, "lr", self.lr, ">= 0")
        require(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, ">= 0")
        require(self.momentum is None or 0 <= self.momentum < 1, "momentum", self.momentum, "in [0, 1)")
        require(all(0 <= beta < 1 for beta in self.betas or ()), "betas", self.betas, "in [0, 1) each")
        require(self.eps is None or 0 < self.eps < math.inf, "eps", self.eps, "> 0")

    @property
    def num_states(self) -> int:
        """Number of state values per weight."""
        return {"adam": 2, "adamw": 2, "rmsprop": 1, "adagrad": 1}.get(self.kind, 0) + bool(self.momentum)

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer of a model. Parameters with weight decay are in a group of their own."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        decaying = _matrices(model)
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if id(p) in decaying], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if id(p) not in decaying], "weight_decay": 0.0},
        ]
        given = {
            "momentum": self.momentum,
            "nesterov": self.nesterov or None,
            "betas": self.betas,
            "eps": self.eps,
            "fused": (self.kind in FUSED and any(p.is_cuda for p in parameters)) or None,
        }
        options = {name: value for name, value in given.items() if value is not None}
        try:
            return OPTIMIZERS[self.kind]([g for g in groups if g["params"]], lr=self.lr, **options)
        except (TypeError, ValueError) as error:
            raise GrowpruneError(f"optimizer {self.kind} does not accept {', '.join(options)}: {error}") from error


def _matrices(model: nn.Module) -> set[int]:
    """Ids of the parameters with two or more dimensions, for any storage."""
    return {
        id(parameter)
        for module in model.modules()
        for local, parameter in module.named_parameters(recurse=False)
        if len(dense_shape(module, local)) > 1
    }


@dataclass(frozen=True)
class LRSchedule:
    """Learning-rate schedule from one restart of the plan to the next, as a factor of the peak."""

    shape: Literal["cosine", "step", "inverse_sqrt", "constant"] = "cosine"
    warmup_epochs: float = 0.0
    """Epochs of linear warm-up from (nearly) zero to the peak."""
    warmup_iterations: int = 0
    """Iterations of warm-up. Replaces warmup_epochs if not 0."""
    milestones: tuple[float, ...] = ()
    """step: fractions of the schedule after which the rate drops."""
    every_epochs: float = 0.0
    """step: epochs between drops. Replaces milestones if not 0."""
    gamma: float = 0.1
    """step: factor of each drop."""
    floor: float = 0.0
    """step: smallest factor."""

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("warmup_epochs", "warmup_iterations", "every_epochs"):
            require(0 <= getattr(self, name) < math.inf, name, getattr(self, name), ">= 0")
        require(all(0 <= share <= 1 for share in self.milestones), "milestones", self.milestones, "in [0, 1] each")
        require(0 < self.gamma <= 1, "gamma", self.gamma, "in (0, 1]")
        require(0 <= self.floor <= 1, "floor", self.floor, "in [0, 1]")

    def factor(self, iteration: int, *, total: int, per_epoch: int) -> float:
        """The factor for an iteration (from 0) out of `total`, with `per_epoch` iterations per epoch."""
        warmup = self.warmup_iterations or round(self.warmup_epochs * per_epoch)
        # 1) linear warm-up; its first iteration already moves
        if iteration < warmup:
            return (iteration + 1) / warmup
        # 2) cosine from the peak to zero over what the warm-up leaves
        if self.shape == "cosine":
            return 0.5 * (1 + math.cos(math.pi * (iteration - warmup) / max(1, total - warmup)))
        # 3) steps down
        if self.shape == "step":
            return max(self.floor, self.gamma ** self._num_drops(iteration, total, per_epoch))
        # 4) the inverse square root of the iteration, 1 where the warm-up ends
        if self.shape == "inverse_sqrt":
            return math.sqrt(max(1, warmup) / (iteration + 1))
        return 1.0

    def _num_drops(self, iteration: int, total: int, per_epoch: int) -> int:
        if self.every_epochs:
            return int(iteration / (self.every_epochs * per_epoch))
        return sum(iteration >= milestone * total for milestone in self.milestones)


def require(holds: bool, name: str, value: object, must: str) -> None:
    if not holds:
        raise GrowpruneError(f"{name} must be {must}, got {value!r}")


def check_choices(settings: object) -> None:
    """Raise if a dataclass field annotated `Literal[...]` has another value."""
    kind: Any = type(settings)
    for name, allowed in _choices(kind).items():
        value = getattr(settings, name)
        require(value in allowed, name, value, f"one of {', '.join(map(str, allowed))}")


@cache
def _choices(kind: type[Any]) -> dict[str, tuple[Any, ...]]:
    """Allowed values of the fields annotated `Literal[...]`. Cached, because reading annotations is slow, and
    comparisons make thousands of recipes."""
    return {name: get_args(hint) for name, hint in get_type_hints(kind).items() if get_origin(hint) is Literal}
