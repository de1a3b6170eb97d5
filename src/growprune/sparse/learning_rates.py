"""Learning rates that follow density: a layer of density d trains at `lr * d ** -exponent` (docs/theory.md).

Just before a step, the param groups of the optimizer are replaced by groups with scaled rates, one for each rate. Just
after it, the user's groups are put back. So schedulers, loggers and checkpoints see only the user's groups.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any, Literal

from torch.optim import Optimizer

from growprune.errors import GrowpruneError
from growprune.storage import SparseParameter
from growprune.storage.uncompiled import uncompiled

CAP = 10.0
"""The largest factor: a layer with almost no live weights would otherwise train at any rate."""
LARGEST = 2.0

Group = dict[str, Any]
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


def auto_exponent(*, is_adam_like: bool) -> float:
    """Return what "auto" stands for: only Adam-like optimizers were seen to gain on every task (docs/theory.md)."""
    return 1.0 if is_adam_like else 0.0


def rate_factor(density: float, exponent: float) -> float:
    """Return the factor of a layer's learning rate.

    >>> [rate_factor(density, 1.0) for density in (1.0, 0.25, 0.01, 0.0)], rate_factor(0.25, 0.5)
    ([1.0, 4.0, 10.0, 10.0], 2.0)
    """
    return min(CAP, density**-exponent) if density > 0 else CAP


class ScaledRates:
    """Scale the learning rates of optimizers while they step.

    Args:
        exponent: 0 leaves rates unchanged, 1 divides them by the density, "auto" looks at the optimizer.
        stored: how the sparse parameters are stored, by name.
    """

    def __init__(self, exponent: Exponent, stored: Mapping[str, SparseParameter]) -> None:
        self.exponent, self._stored = exponent, stored
        self.is_on = True
        """False if "auto" means 0 for this training, whatever the optimizer."""
        self.densities: dict[str, float] | None = None
        """By parameter. None after a mask has changed; they are counted at the next step."""
        self._own: weakref.WeakKeyDictionary[Optimizer, list[tuple[Group, list[Group]]]] = weakref.WeakKeyDictionary()
        """The user's groups of optimizers that are stepping, each with the groups that stand for it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ScaledRates:
        return ScaledRates(self.exponent, copy.deepcopy(self._stored, memo))

    def check(self, optimizer: Optimizer) -> None:
        """Raise if there is no learning rate to scale."""
        if self._exponent_for(optimizer) and any("lr" not in group for group in optimizer.param_groups):
            raise GrowpruneError(
                f"lr_scaling={self.exponent:g} needs a learning rate, but {type(optimizer).__name__} has none: use "
                f"lr_scaling=0, or an optimizer with an lr"
            )

    def _exponent_for(self, optimizer: Optimizer) -> float:
        if self.exponent == "auto":
            is_adam_like = all({"lr", "betas"} <= group.keys() for group in optimizer.param_groups)
            return auto_exponent(is_adam_like=is_adam_like) if self.is_on else 0.0
        return self.exponent

    def hook_before(self, optimizer: Optimizer, when_gradients_are_there: Callable[..., Any]) -> None:
        """Scale rates before other hooks, so that rules see the rates that the step uses."""
        if self.exponent:

            def scale(stepping: Optimizer, args: Any, kwargs: Any) -> Any:
                return when_gradients_are_there(args, kwargs, lambda: self._scale(stepping))

            optimizer.register_step_pre_hook(uncompiled(scale))
            # a step that raised has left scaled groups in place
            optimizer.register_state_dict_pre_hook(self.put_back)
            optimizer.register_load_state_dict_pre_hook(lambda loading, state: self.put_back(loading))

    def hook_after(self, optimizer: Optimizer) -> None:
        """Put the user's groups back after other hooks, and before a cursor edits."""
        if self.exponent:
            optimizer.register_step_post_hook(uncompiled(lambda stepped, args, kwargs: self.put_back(stepped)))

    def _scale(self, optimizer: Optimizer) -> None:
        self.put_back(optimizer)
        if not (exponent := self._exponent_for(optimizer)):
            return
        if self.densities is None:
            self.densities = {name: stored.num_alive() / stored.shape.numel() for name, stored in self._stored.items()}
        factors = {id(self._stored[name].parameter): rate_factor(d, exponent) for name, d in self.densities.items()}
        groups = [(group, list(_split(group, factors))) for group in optimizer.param_groups]
        self._own[optimizer] = groups
        optimizer.param_groups = [scaled for _, several in groups for scaled in several]

    def put_back(self, optimizer: Optimizer) -> None:
        """Give an optimizer the user's groups again, with what the step itself wrote into its groups."""
        if (groups := self._own.pop(optimizer, None)) is None:
            return
        for own, (first, *_) in groups:
            own.update({name: value for name, value in first.items() if name not in ("params", "lr")})
        optimizer.param_groups = [own for own, _ in groups]


def _split(group: Group, factors: Mapping[int, float]) -> Iterator[Group]:
    """Split a group by rate. A group whose rates stay as they are is itself."""
    by_factor: dict[float, list[Any]] = {}
    for parameter in group["params"]:
        by_factor.setdefault(factors.get(id(parameter), 1.0), []).append(parameter)
    if by_factor.keys() <= {1.0}:
        yield group
        return
    for factor, parameters in by_factor.items():
        yield {**group, "params": parameters, "lr": group["lr"] * factor}
