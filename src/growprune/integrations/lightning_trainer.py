"""What `GrowPrune` asks of a Trainer of Lightning, and does to it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint, ModelPruning
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch.nn.parallel import DistributedDataParallel

from growprune.errors import GrowpruneError
from growprune.sparse.model import SparseModel
from growprune.training.settings import Settings


def check_trainer(trainer: Trainer) -> None:
    """Refuse trainers that the callback cannot work with."""
    if not isinstance(trainer, Trainer):
        raise GrowpruneError(
            f"GrowPrune needs a Trainer of lightning.pytorch, got one of {type(trainer).__module__}: import "
            f"lightning.pytorch, not pytorch_lightning"
        )
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy):
        raise GrowpruneError(
            f"GrowPrune does not work with {type(trainer.strategy).__name__}: use ModelParallelStrategy (FSDP2), "
            f"strategy='ddp' or one device"
        )
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks_of(trainer)):
        raise GrowpruneError(
            "GrowPrune does not work with GradientAccumulationScheduler, which hides the number of steps: use "
            "Trainer(accumulate_grad_batches=...)"
        )
    if any(isinstance(callback, ModelPruning) for callback in callbacks_of(trainer)):
        raise GrowpruneError("ModelPruning prunes the same weights as GrowPrune: give the Trainer only one of the two")


def lengths_of(trainer: Trainer, max_epochs: int | None, arguments: Settings) -> tuple[int, int | None]:
    """How many optimizer steps a trainer makes, in all and in an epoch.

    Args:
        max_epochs: as the user said.
        arguments: where the module steps by itself, their `iterations` say how often.
    """
    batches = trainer.num_training_batches
    per_epoch = math.ceil(batches / trainer.accumulate_grad_batches) if math.isfinite(batches) else None
    total = trainer.estimated_stepping_batches
    if per_epoch and max_epochs is not None and max_epochs != trainer.max_epochs:
        total = min(total, per_epoch * max_epochs)
    if not trainer.lightning_module.automatic_optimization:
        total = total if arguments.iterations is None else arguments.iterations
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
    """What to give a Trainer for a training of `iterations` optimizer steps."""
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
    """The methods by which callbacks judge a model: those that keep the best, and those that stop the training."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, ModelCheckpoint) and callback.monitor is not None:
            yield callback, "check_monitor_top_k"
        if isinstance(callback, EarlyStopping):
            yield from ((callback, method) for method in ("on_train_epoch_end", "on_validation_end"))


def wrap_again(trainer: Trainer) -> None:
    """Compact weights have new parameters after an edit, which DistributedDataParallel has to get to know."""
    strategy = trainer.strategy
    if not isinstance(strategy, DDPStrategy) or not isinstance(strategy.model, DistributedDataParallel):
        return
    if not trainer.lightning_module.automatic_optimization:
        raise GrowpruneError(
            "storage='compact' does not work with manual optimization in several processes: use storage='masked'"
        )
    strategy.model = trainer.lightning_module
    strategy.configure_ddp()


def check_ranks(sparse: SparseModel, trainer: Trainer) -> None:
    """Raise, on all processes, if they do not have the same masks."""
    if trainer.world_size == 1:
        return
    digest = hashlib.sha256()
    for mask in sparse.packed_masks().values():
        digest.update(mask.cpu().numpy().tobytes())
    mine = digest.hexdigest()
    if not trainer.strategy.reduce_boolean_decision(trainer.strategy.broadcast(mine) == mine):
        raise GrowpruneError(
            "the processes have different masks: start them with the same weights and seed, and average gradients in "
            "every step"
        )
