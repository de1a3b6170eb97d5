"""What `GrowPruneCallback` reads and changes in the Trainer of transformers, beyond what callbacks are given."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from transformers import Trainer, get_scheduler

from growprune.errors import GrowpruneError
from growprune.integrations import transformers_sharded as sharded
from growprune.integrations.callback import looking
from growprune.plan import By
from growprune.sparse.cursor import Cursor
from growprune.sparse.model import SparseModel


def running_trainer() -> tuple[Any, str | None]:
    """The Trainer that is about to train, and the checkpoint it resumes: it tells callbacks neither."""
    found = _locals_of("_inner_training_loop")
    return found["self"], found.get("resume_from_checkpoint")


def trainer_being_made() -> Any:
    """The Trainer that calls `on_init_end`."""
    return _locals_of("__init__")["self"]


def take_over(trainer: Any, method: str, first: Callable[..., None]) -> None:
    """Have something done, with the same arguments, before a Trainer does something that no callback hears of."""
    own = getattr(type(trainer), method, None)
    if own is None:  # it would never be done, and nobody would know
        raise GrowpruneError(
            f"this Trainer has no method {method}: install a version of transformers that growprune supports"
        )

    def both(*args: Any, **kwargs: Any) -> Any:
        first(*args, **kwargs)
        return own(trainer, *args, **kwargs)

    vars(trainer)[method] = both


def _locals_of(method: str) -> dict[str, Any]:
    """The local variables of a method of a Trainer that is being called."""
    frame = sys._getframe()
    while frame is not None:
        found = frame.f_locals
        if frame.f_code.co_name == method and isinstance(found.get("self"), Trainer):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    raise GrowpruneError(
        "GrowPruneCallback works only in the Trainer of transformers: give it as Trainer(callbacks=[...])"
    )


def check_trainer(trainer: Any, storage: str) -> None:
    """Refuse a Trainer that cannot train a sparse model."""
    if trainer.state.is_hyper_param_search:
        raise GrowpruneError("GrowPruneCallback does not work with hyperparameter_search(): make one Trainer per trial")
    if trainer.args.n_gpu > 1:
        raise GrowpruneError(
            "GrowPruneCallback does not work with DataParallel: start one process per GPU with torchrun"
        )
    if trainer.args.world_size > 1 and not sharded.is_sharding(trainer) and storage == "compact":
        raise GrowpruneError(
            "storage='compact' does not work with DDP, since the Trainer wraps the model only once: use "
            "storage='masked', or FSDP2 (TrainingArguments(fsdp=True)) on GPUs"
        )
    if isinstance(trainer.lr_scheduler, ReduceLROnPlateau) or type(trainer.lr_scheduler).__name__ == "GreedyLR":
        raise GrowpruneError(
            f"{type(trainer.lr_scheduler).__name__} reacts to the loss, which jumps when weights are pruned: choose "
            f"another lr_scheduler_type, such as 'cosine'"
        )


def score(trainer: Any, loader: Any, sparse: SparseModel, by: By) -> None:
    """Look at the batches of the first step, by the Trainer's own loss, for an edit by gradient before any training."""

    def loss(batch: Any) -> Tensor:
        with trainer.compute_loss_context_manager():
            inputs = trainer._prepare_inputs(batch)
            found: Tensor = trainer.compute_loss(sparse.model, inputs, num_items_in_batch=num_items)
            return found

    sparse.model.train()
    count = trainer.args.gradient_accumulation_steps
    with looking(by):
        # as a plain loader: accelerate's own keeps count of who iterates over it
        batches = DataLoader.__iter__(loader) if isinstance(loader, DataLoader) else iter(loader)
        first, num_items = trainer.get_batch_samples(batches, count, trainer.args.device)
        sparse.score(by, [functools.partial(loss, batch) for batch in first])


def steps_per_epoch(args: Any, loader: Any) -> int | None:
    """How many optimizer steps the Trainer makes in an epoch, if its data have a length."""
    try:
        num_batches = len(loader)
    except TypeError:  # an iterable dataset
        return None
    return max(1, math.ceil(num_batches / int(args.gradient_accumulation_steps)))


def remedy(args: Any, per_epoch: int | None, steps: int) -> str:
    """What to give a Trainer for a training of `steps` optimizer steps."""
    if args.max_steps <= 0 and per_epoch and steps % per_epoch == 0:
        return f"TrainingArguments(num_train_epochs={steps // per_epoch})"
    return f"TrainingArguments(max_steps={steps})"


# Learning rates: the whole schedule for each phase that begins it anew


def has_restarts(cursor: Cursor) -> bool:
    return any(scheduled.phase.restart for scheduled in cursor.schedule)


def _restarts(cursor: Cursor) -> list[int]:
    """The steps at which the learning-rate schedule begins, and, last, where the plan ends."""
    bounds, step = [0], 0
    for scheduled in cursor.schedule:
        bounds += [step] if scheduled.phase.restart and step > bounds[-1] else []
        step += cursor.length_of(scheduled.phase)
    return [*bounds, step]


def restart_rates(args: Any, scheduler: Any, cursor: Cursor) -> None:
    """Give each phase that restarts the whole schedule, until the next one that does."""
    factor = _factor(args, _restarts(cursor))
    scheduler.lr_lambdas = [factor] * len(scheduler.base_lrs)
    for group, base in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
        group["lr"] = base * factor(scheduler.last_epoch)


def _factor(args: Any, bounds: Sequence[int]) -> Callable[[int], float]:
    """The factor of the learning rate at a step, with the whole schedule between each two bounds."""
    factors = [_factor_of_schedule(args, end - start) for start, end in itertools.pairwise(bounds)]

    def factor(step: int) -> float:
        number = min(bisect.bisect_right(bounds, step), len(factors)) - 1
        return factors[number](step - bounds[number])

    return factor


def _factor_of_schedule(args: Any, length: int) -> Callable[[int], float]:
    """That of the schedule that TrainingArguments ask for, of a given length."""
    nothing = SGD([nn.Parameter()], lr=args.learning_rate)
    warmup = args.get_warmup_steps(length)
    made = get_scheduler(args.lr_scheduler_type, nothing, warmup, length, args.lr_scheduler_kwargs)
    factor: Callable[[int], float] = made.lr_lambdas[0]
    return factor
