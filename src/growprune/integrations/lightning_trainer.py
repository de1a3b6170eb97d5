"""What `GrowPrune` asks a Trainer of Lightning, and its learning-rate schedules, which phases restart."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint, ModelPruning
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.optim.lr_scheduler import ReduceLROnPlateau

from growprune.errors import GrowpruneError
from growprune.sparse.cursor import Cursor
from growprune.training.settings import Settings


def check_trainer(trainer: Trainer, module: LightningModule, storage: str) -> None:
    """Raise if a Trainer cannot train a sparse model."""
    if not isinstance(trainer, Trainer):
        raise GrowpruneError(
            f"GrowPrune needs a Trainer of lightning.pytorch, got one of {type(trainer).__module__}: import "
            f"lightning.pytorch, not pytorch_lightning"
        )
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        raise GrowpruneError(
            f"GrowPrune does not work with {type(trainer.strategy).__name__}: use strategy='ddp' or one device, or a "
            f"loop of your own with sparse.shard(mesh)"
        )
    if storage == "compact" and isinstance(trainer.strategy, DDPStrategy):
        raise GrowpruneError(
            "storage='compact' does not work with DDP, which keeps the weights from before an edit: use "
            "storage='masked'"
        )
    if storage == "compact" and not module.automatic_optimization:
        raise GrowpruneError(
            "storage='compact' does not work with manual optimization, where edits replace weights within a batch: use "
            "storage='masked'"
        )
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks_of(trainer)):
        raise GrowpruneError(
            "GrowPrune does not work with GradientAccumulationScheduler, which hides the number of steps: use "
            "Trainer(accumulate_grad_batches=...)"
        )
    if any(isinstance(callback, ModelPruning) for callback in callbacks_of(trainer)):
        raise GrowpruneError("ModelPruning prunes the same weights as GrowPrune: give the Trainer only one of the two")


def lengths_of(trainer: Trainer, max_epochs: int | None, settings: Settings) -> tuple[int, int | None]:
    """Return how many optimizer steps a trainer makes, in all and in an epoch.

    Args:
        max_epochs: as the user said.
        settings: where the module steps by itself, their `iterations` say how often.
    """
    batches = trainer.num_training_batches
    per_epoch = math.ceil(batches / trainer.accumulate_grad_batches) if math.isfinite(batches) else None
    total = trainer.estimated_stepping_batches
    if per_epoch and max_epochs is not None and max_epochs != trainer.max_epochs:
        total = min(total, per_epoch * max_epochs)
    if not trainer.lightning_module.automatic_optimization:
        total = total if settings.iterations is None else settings.iterations
    is_endless = not math.isfinite(total) or total < 0
    if is_endless and per_epoch is None and max_epochs not in (None, -1):
        raise GrowpruneError(
            f"the data have no length, so max_epochs={max_epochs} does not give the number of steps: use "
            f"Trainer(max_steps=...)"
        )
    if is_endless:
        raise GrowpruneError("the Trainer has no limit, but a plan needs one: give it max_epochs or max_steps")
    return int(total), per_epoch


def remedy(trainer: Trainer, per_epoch: int | None, iterations: int) -> str:
    """Return what to give a Trainer for a training of `iterations` optimizer steps."""
    if vars(trainer)["fast_dev_run"]:
        return "Trainer(fast_dev_run=False)"
    if per_epoch and iterations % per_epoch == 0:
        return f"Trainer(max_epochs={iterations // per_epoch})"
    return f"Trainer(max_steps={iterations})"


def callbacks_of(trainer: Any) -> list[Callback]:
    return list(trainer.callbacks)  # which its class does not declare


def place_first(trainer: Any, callback: Callback) -> None:
    """Let a callback be the first, so that others find what it logs; a new list, since the old one is being called."""
    trainer.callbacks = [callback, *(other for other in trainer.callbacks if other is not callback)]


def judging(trainer: Trainer) -> Iterator[tuple[Callback, str]]:
    """Yield the methods by which callbacks judge a model: to keep the best, or to stop the training."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, ModelCheckpoint) and callback.monitor is not None:
            yield callback, "check_monitor_top_k"
        if isinstance(callback, EarlyStopping):
            yield from ((callback, method) for method in ("on_train_epoch_end", "on_validation_end"))


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
