"""The optimizers of a Trainer of Lightning: which of them advances the plan, and schedules that phases restart."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from growprune.errors import GrowpruneError
from growprune.sparse.cursor import Cursor


class Clock:
    """Attaches all optimizers to the model; the last that trains prunable weights advances the plan.

    A module that steps its optimizers itself may be amid a training_step when an edit gives compact weights new
    parameters. Then the clock watches that no backward pass reaches the old ones.
    """

    def __init__(self, cursor: Cursor, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._sparse = sparse = cursor.sparse
        of_name = dict(sparse.model.named_parameters())
        prunable = {id(of_name[weight.parameter]) for weight in sparse.weights}
        trained = [{id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
        clocks = [o for o, ids in zip(optimizers, trained, strict=True) if ids & prunable]
        if not clocks:
            raise GrowpruneError(
                f"no optimizer trains a prunable weight such as {sparse.weights[0].parameter}: give at least one of "
                f"them to an optimizer in configure_optimizers"
            )
        for optimizer in optimizers:
            sparse.attach(optimizer)
        cursor.attach(clocks[-1])
        self._name = f"{optimizers.index(clocks[-1]) + 1} of {len(optimizers)} ({type(clocks[-1]).__name__})"
        self._parameters: dict[str, nn.Parameter] = {}
        self._hook: Any = None
        if sparse.storage == "compact" and not sparse.model.automatic_optimization:
            self._parameters = self._stored_parameters()
            self._hook = clocks[-1].register_step_post_hook(self._follow_edit)  # after the cursor's, which edits

    def stop(self) -> None:
        """Watch no longer."""
        if self._hook is not None:
            self._hook.remove()
        self._parameters = {}

    def say_order(self) -> str:
        """The order of optimizers that works, for a message."""
        return (
            f"GrowPrune prunes and grows when the last optimizer with prunable weights steps, here number "
            f"{self._name}: in configure_optimizers, return last the optimizer that steps last in training_step"
        )

    def _stored_parameters(self) -> dict[str, nn.Parameter]:
        return {name: stored.parameter for name, stored in self._sparse.stored.items()}

    def _follow_edit(self, *_: Any) -> None:
        before, self._parameters = self._parameters, self._stored_parameters()
        _follow_toggled(self._sparse.model, before, self._parameters)
        for name, old in before.items():
            if old is not self._parameters[name] and old.requires_grad:
                old.register_hook(self._refuse_late)  # type: ignore[no-untyped-call]

    def _refuse_late(self, gradient: Tensor) -> None:
        raise GrowpruneError(
            f"a backward pass reached weights that were pruned or grown after its forward pass, so they would not be "
            f"trained: {self.say_order()}"
        )


def _follow_toggled(module: Any, before: Mapping[str, nn.Parameter], now: Mapping[str, nn.Parameter]) -> None:
    """Let `untoggle_optimizer` find compact weights that an edit has given new parameters while they were toggled off.

    It looks for the parameters that were there when `toggle_optimizer` was called; others would stay frozen.
    """
    toggled: Any = module._param_requires_grad_state
    for name, parameter in now.items() if toggled else ():
        if before.get(name) in toggled:
            toggled[parameter] = toggled[before[name]]


class Schedules:
    """The learning-rate schedules and optimizer settings of a trainer as they are made, for phases that restart."""

    def __init__(self, trainer: Trainer) -> None:
        self._schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._states = [copy.deepcopy(scheduler.state_dict()) for scheduler in self._schedulers]
        self._groups = [
            [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]

    def check(self, cursor: Cursor) -> None:
        """Raise if a phase restarts what cannot start anew."""
        is_plateau = any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in self._schedulers)
        if is_plateau and any(scheduled.phase.restart for scheduled in cursor.schedule):
            raise GrowpruneError(
                "ReduceLROnPlateau cannot restart with each phase: give GrowPrune restart=False, or use another "
                "schedule"
            )

    def restart(self, trainer: Trainer) -> None:
        """Let all start anew; the cursor empties the optimizers' state.

        Schedules that others have put in their place since, as StochasticWeightAveraging does, stay as they are.
        """
        if [id(config.scheduler) for config in trainer.lr_scheduler_configs] != [id(mine) for mine in self._schedulers]:
            return
        for scheduler, state in zip(self._schedulers, self._states, strict=True):
            scheduler.load_state_dict(copy.deepcopy(state))
        for optimizer, groups in zip(trainer.optimizers, self._groups, strict=True):
            for group, first in zip(optimizer.param_groups, groups, strict=True):
                group.update(copy.deepcopy(first))
