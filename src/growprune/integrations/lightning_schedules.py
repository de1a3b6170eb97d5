"""Learning-rate schedules of a Trainer of Lightning that begin anew with phases."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Trainer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from growprune.errors import GrowpruneError
from growprune.sparse.cursor import Cursor


class Schedules:
    """The learning-rate schedules and optimizer settings of a trainer as they are made, for phases that restart."""

    def __init__(self, schedulers: Sequence[Any] = (), groups: Sequence[list[dict[str, Any]]] = ()) -> None:
        self._schedulers, self._groups = schedulers, groups
        self._states = [copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers]
        self.is_plateau = any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in schedulers)

    @classmethod
    def of(cls, trainer: Trainer) -> Schedules:
        """Those that a trainer has now."""
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        groups = [
            [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]
        return cls(schedulers, groups)

    def check(self, cursor: Cursor) -> None:
        """Raise if a phase restarts what cannot start anew."""
        if self.is_plateau and any(scheduled.phase.restart for scheduled in cursor.schedule):
            raise GrowpruneError(
                "ReduceLROnPlateau compares with epochs before, so it cannot start anew with each phase: give "
                "GrowPrune restart=False, or the module another schedule"
            )

    def restart(self, trainer: Trainer) -> None:
        """Let all start anew; the cursor empties the optimizers' state.

        Schedules that others have put in their place since, as StochasticWeightAveraging does, go on as they are.
        """
        if [id(config.scheduler) for config in trainer.lr_scheduler_configs] != [id(mine) for mine in self._schedulers]:
            return
        for scheduler, state in zip(self._schedulers, self._states, strict=True):
            scheduler.load_state_dict(copy.deepcopy(state))
        for optimizer, groups in zip(trainer.optimizers, self._groups, strict=True):
            for group, first in zip(optimizer.param_groups, groups, strict=True):
                group.update(copy.deepcopy(first))
