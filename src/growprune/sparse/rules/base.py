"""What carries a rule out: called around each step of an attached optimizer, while a phase has a rule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from growprune.errors import GrowpruneError
from growprune.sparse.internals import Internals


class RunningRule:
    """A rule at work on a sparse model."""

    def enter(self) -> None:
        """Called when a phase begins, after its edits; not where a phase is resumed, whose state is loaded."""

    def before_step(self, trained: Mapping[str, float], /) -> None:
        """Called once there are the gradients of the prunable parameters that an optimizer trains.

        Args:
            trained: their learning rates, by name; NaN where the optimizer has none (see `check_rates`).
        """

    def after_step(self, trained: Mapping[str, float], /) -> None:
        """Called after the step, when pruned weights are exactly zero again."""

    def figures(self) -> dict[str, float]:
        """Numbers worth logging; `sparsity` is the fraction of zeros that the rule has made by itself."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        raise NotImplementedError


def check_masked(own: Internals, why: str) -> None:
    """Raise if a rule cannot work with the storage of a model."""
    if own.storage != "masked":
        raise GrowpruneError(f"{why}, but storage is {own.storage!r}: use storage='masked'")


def check_rates(who: str, trained: Mapping[str, float]) -> None:
    """Raise, before anything is done, if a rule needs learning rates and an optimizer has none.

    Args:
        who: the method's name, for the error.
        trained: the learning rates that the rule needs, by the names of parameters.
    """
    if unknown := [name for name, rate in trained.items() if math.isnan(rate)]:
        raise GrowpruneError(
            f"{who} goes by the learning rate of each step, but the optimizer has no lr for {unknown[0]}: give it one "
            f"(of transformers' Adafactor, lr=1e-3 with relative_step=False), or use another optimizer"
        )


class Iterations:
    """Counts iterations by the parameters that are stepped: of several optimizers, one may step after the other."""

    def __init__(self) -> None:
        self.begun = 0
        self._stepped: set[str] = set()

    def step(self, names: Iterable[str]) -> bool:
        """Note that these are stepped. True if that begins an iteration, as when one of them steps again."""
        names = set(names)
        is_new = not self._stepped or not self._stepped.isdisjoint(names)
        if is_new:
            self.begun, self._stepped = self.begun + 1, set()
        self._stepped |= names
        return is_new

    def resume(self, begun: int) -> None:
        self.begun, self._stepped = begun, set()
