"""What carries a rule out, as a SparseModel sees it: something to call around each step of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class RunningRule(Protocol):
    """What happens around each step of an attached optimizer, while a phase has a rule (see growprune.rules)."""

    def enter(self) -> None:
        """Called when its phase begins, the edits done; not where a phase is gone on with, whose state is loaded."""

    def before_step(self, trained: Mapping[str, float], /) -> None:
        """Called when the gradients are there of the prunable parameters that an optimizer trains.

        Args:
            trained: their learning rates, by name.
        """

    def after_step(self, trained: Mapping[str, float], /) -> None:
        """Called after the step, when what is pruned is exactly zero again."""

    def figures(self) -> dict[str, float]:
        """What is worth telling of it; `sparsity` is the fraction of zeros that it has made by itself."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...
