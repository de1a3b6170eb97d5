"""What `GrowPruneCallback` asks the Trainer of transformers: whether it can train, lengths, losses and schedules."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from transformers import get_scheduler

from growprune.errors import GrowpruneError
from growprune.integrations.callback import scoring
from growprune.plan import By
from growprune.sparse.cursor import Cursor
from growprune.sparse.model import SparseModel


def check_trainer(trainer: Any, storage: str) -> None:
    """Raise if a Trainer cannot train a sparse model."""
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        name = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed"
        raise GrowpruneError(
            f"GrowPruneCallback does not work with {name}: use DDP, or a loop of your own with sparse.shard(mesh)"
        )
    if trainer.args.auto_find_batch_size:
        raise GrowpruneError(
            "GrowPruneCallback does not work with auto_find_batch_size, which begins the training again: set "
            "per_device_train_batch_size"
        )
    if trainer.state.is_hyper_param_search:
        raise GrowpruneError("GrowPruneCallback does not work with hyperparameter_search(): make one Trainer per trial")
    if trainer.args.n_gpu > 1:
        raise GrowpruneError(
            "GrowPruneCallback does not work with DataParallel: start one process per GPU with torchrun"
        )
    if trainer.args.world_size > 1 and storage == "compact":
        raise GrowpruneError(
            "storage='compact' does not work with DDP, since the Trainer wraps the model only once: use "
            "storage='masked'"
        )
    if isinstance(trainer.lr_scheduler, ReduceLROnPlateau) or type(trainer.lr_scheduler).__name__ == "GreedyLR":
        raise GrowpruneError(
            f"{type(trainer.lr_scheduler).__name__} reacts to the loss, which jumps when weights are pruned: choose "
            f"another lr_scheduler_type, such as 'cosine'"
        )


def score(trainer: Any, loader: Any, sparse: SparseModel, by: By) -> None:
    """Compute gradients of the batches of the first step, with the Trainer's own loss, for an edit that needs them."""

    def loss(batch: Any) -> Tensor:
        with trainer.compute_loss_context_manager():
            inputs = trainer._prepare_inputs(batch)
            found: Tensor = trainer.compute_loss(sparse.model, inputs, num_items_in_batch=num_items)
            return found

    sparse.model.train()
    count = trainer.args.gradient_accumulation_steps
    with scoring(by):
        # as a plain loader: accelerate's own keeps count of who iterates over it
        batches = DataLoader.__iter__(loader) if isinstance(loader, DataLoader) else iter(loader)
        first, num_items = trainer.get_batch_samples(batches, count, trainer.args.device)
        sparse.score(by, [functools.partial(loss, batch) for batch in first])


def steps_per_epoch(args: Any, loader: Any) -> int | None:
    """Return how many optimizer steps the Trainer makes in an epoch, if its data have a length."""
    try:
        num_batches = len(loader)
    except TypeError:  # an iterable dataset
        return None
    return max(1, math.ceil(num_batches / int(args.gradient_accumulation_steps)))


def remedy(args: Any, per_epoch: int | None, steps: int) -> str:
    """Return what to give a Trainer for a training of `steps` optimizer steps."""
    if args.max_steps <= 0 and per_epoch and steps % per_epoch == 0:
        return f"TrainingArguments(num_train_epochs={steps // per_epoch})"
    return f"TrainingArguments(max_steps={steps})"


# Learning rates: each phase that restarts has the whole schedule


def has_restarts(cursor: Cursor) -> bool:
    return any(scheduled.phase.restart for scheduled in cursor.schedule)


def restart_rates(args: Any, scheduler: Any, cursor: Cursor) -> None:
    """Give each phase that restarts the whole schedule, until the next one that does."""
    bounds, step = [0], 0  # where the schedule begins; last, where the plan ends
    for scheduled in cursor.schedule:
        bounds += [step] if scheduled.phase.restart and step > bounds[-1] else []
        step += cursor.length_of(scheduled.phase)
    bounds.append(step)

    def of_schedule(length: int) -> Callable[[int], float]:
        nothing = SGD([nn.Parameter()], lr=args.learning_rate)
        warmup = args.get_warmup_steps(length)
        made = get_scheduler(args.lr_scheduler_type, nothing, warmup, length, args.lr_scheduler_kwargs)
        factor: Callable[[int], float] = made.lr_lambdas[0]
        return factor

    factors = [of_schedule(end - start) for start, end in itertools.pairwise(bounds)]

    def factor(step: int) -> float:
        number = min(bisect.bisect_right(bounds, step), len(factors)) - 1
        return factors[number](step - bounds[number])

    scheduler.lr_lambdas = [factor] * len(scheduler.base_lrs)
    for group, base in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
        group["lr"] = base * factor(scheduler.last_epoch)
