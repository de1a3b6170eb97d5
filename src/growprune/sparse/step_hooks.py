"""What carries a rule out, as a SparseModel sees it: something to call around each step of an optimizer."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from growprune.errors import GrowpruneError
from growprune.sparse.optimizers import Optimizers, is_skipped, unscale, when_gradients_are_there

if TYPE_CHECKING:
    from growprune.sparse.model import SparseModel


class RunningRule(Protocol):
    """What happens around each step of an attached optimizer, while a phase has a rule (see growprune.sparse.rules)."""

    def enter(self) -> None:
        """Called when its phase begins, the edits done; not where a phase is gone on with, whose state is loaded."""

    def before_step(self, trained: Mapping[str, float], /) -> None:
        """Called when the gradients are there of the prunable parameters that an optimizer trains.

        Args:
            trained: their learning rates, by name; not a number where the optimizer has none (see `check_rates`).
        """

    def after_step(self, trained: Mapping[str, float], /) -> None:
        """Called after the step, when what is pruned is exactly zero again."""

    def figures(self) -> dict[str, float]:
        """What is worth telling of it; `sparsity` is the fraction of zeros that it has made by itself."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


def check_rates(who: str, trained: Mapping[str, float]) -> None:
    """Raise, before anything is done, if a rule goes by learning rates and an optimizer has none.

    Args:
        who: the method's name, for the error.
        trained: the learning rates that the rule goes by, by the names of parameters.
    """
    if unknown := [name for name, rate in trained.items() if math.isnan(rate)]:
        raise GrowpruneError(
            f"{who} goes by the learning rate of each step, but the optimizer has no lr for {unknown[0]}: give it one "
            f"(of transformers' Adafactor, lr=1e-3 with relative_step=False), or use another optimizer"
        )


def hook_steps(optimizer: torch.optim.Optimizer, sparse: SparseModel, optimizers: Optimizers) -> None:
    """Have each step of an optimizer call the rule that a model has then, and end the iteration of its gradients.

    Args:
        optimizers: those attached to the model. The optimizer must be one of them already, so that its steps are masked
            before a rule sees them.
    """
    own = weakref.ref(sparse)  # an optimizer does not keep the model
    optimizer.register_step_pre_hook(functools.partial(_before_step, own, optimizers))
    optimizer.register_step_post_hook(functools.partial(_after_step, own, optimizers))


def _before_step(
    reference: weakref.ref[SparseModel],
    optimizers: Optimizers,
    optimizer: torch.optim.Optimizer,
    args: Any,
    kwargs: Any,
) -> Any:
    """Let a rule act before an optimizer's step, as long as there is somebody to have one."""
    sparse = reference()
    if sparse is None or sparse.rule is None or is_skipped(optimizer):
        return None
    unscale(optimizer)
    trained = optimizers.learning_rates(optimizer)
    return when_gradients_are_there(args, kwargs, functools.partial(sparse.rule.before_step, trained))


def _after_step(
    reference: weakref.ref[SparseModel], optimizers: Optimizers, optimizer: torch.optim.Optimizer, *_: Any
) -> None:
    sparse = reference()
    if sparse is None or is_skipped(optimizer):
        return
    if sparse.gradients.is_watching:
        others = optimizers.trained_by_others(optimizer)
        sparse.gradients.end_iteration(of_others=others, scale=vars(optimizer).get("grad_scale"))
    if sparse.rule is not None:
        sparse.rule.after_step(optimizers.learning_rates(optimizer))
