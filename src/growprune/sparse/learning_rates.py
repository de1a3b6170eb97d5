"""Learning rates that follow density: a layer of density d trains at `lr * d ** -exponent` (docs/theory.md).

The stepper (stepper.py) splits the param groups of an optimizer by rate just before a step, and puts the user's groups
back just after it. So schedulers, loggers and checkpoints see only the user's groups.
"""

from __future__ import annotations

from numbers import Real
from typing import Literal

from torch.optim import Adafactor, Optimizer

from growprune.errors import GrowpruneError

CAP = 10.0
"""The largest factor: a layer with almost no live weights would otherwise train at any rate."""
LARGEST = 2.0

Exponent = float | Literal["auto"]


def parse_lr_scaling(given: Exponent) -> Exponent:
    """Check an lr_scaling setting.

    >>> parse_lr_scaling("auto"), parse_lr_scaling(1)
    ('auto', 1.0)
    """
    if given == "auto":
        return "auto"
    if isinstance(given, bool) or not isinstance(given, Real) or not 0 <= given <= LARGEST:
        raise GrowpruneError(
            f"lr_scaling must be 'auto' or an exponent in [0, {LARGEST:g}], got {given!r}. 0 leaves learning rates "
            f"unchanged, 1 divides them by the density of the layer"
        )
    return float(given)


def exponent_for(lr_scaling: Exponent, optimizer: Optimizer) -> float:
    """Return the exponent that a setting means for an optimizer.

    "auto" is 1 for Adam-like optimizers, since only these were seen to gain on every task (docs/theory.md).
    """
    if lr_scaling != "auto":
        return lr_scaling
    is_adam_like = all({"lr", "betas"} <= group.keys() for group in optimizer.param_groups)
    return 1.0 if is_adam_like and not adapts_its_rate(optimizer) else 0.0


def check_rates(lr_scaling: Exponent, optimizer: Optimizer) -> None:
    """Raise if learning rates are to be scaled, and the optimizer has none, or only one for all layers."""
    if not (exponent := exponent_for(lr_scaling, optimizer)):
        return
    name = type(optimizer).__name__
    if any("lr" not in group for group in optimizer.param_groups):
        raise GrowpruneError(
            f"lr_scaling={exponent:g} needs a learning rate, but {name} has none: use lr_scaling=0, or an optimizer "
            f"with an lr"
        )
    if adapts_its_rate(optimizer):
        raise GrowpruneError(
            f"lr_scaling={exponent:g} gives layers different learning rates, but {name} needs one rate for all: use "
            f"lr_scaling=0"
        )


def adapts_its_rate(optimizer: Optimizer) -> bool:
    """True for Prodigy and D-Adaptation, which refuse different rates, and for schedule-free optimizers.

    Their param groups hold running numbers of the whole training: an estimated distance d, or the sum of all weights of
    an average.
    """
    if isinstance(optimizer, Adafactor):
        return False  # its d is where it clips updates
    return any(not {"d", "weight_sum"}.isdisjoint(group) for group in optimizer.param_groups)


def rate_factor(density: float, exponent: float) -> float:
    """Return the factor of a layer's learning rate.

    >>> [rate_factor(density, 1.0) for density in (1.0, 0.25, 0.01, 0.0)], rate_factor(0.25, 0.5)
    ([1.0, 4.0, 10.0, 10.0], 2.0)
    """
    return min(CAP, density**-exponent) if density > 0 else CAP


def auto_exponent(*, is_adam_like: bool) -> float:
    return 1.0 if is_adam_like else 0.0
