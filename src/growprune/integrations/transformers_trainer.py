"""What `GrowPruneCallback` asks of the Trainer of transformers, beyond what callbacks are told."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer

from growprune.errors import GrowpruneError
from growprune.integrations.gradients import looking
from growprune.plan import By
from growprune.sparse.model import SparseModel


def running_trainer() -> tuple[Any, str | None]:
    """The Trainer that is about to train, and the checkpoint it resumes: it tells callbacks neither."""
    found = _locals_of("_inner_training_loop")
    return found["self"], found.get("resume_from_checkpoint")


def trainer_being_made() -> Any:
    """The Trainer that calls `on_init_end`."""
    return _locals_of("__init__")["self"]


def take_over(trainer: Any, method: str, first: Callable[..., None]) -> None:
    """Have something done, with the same arguments, before a Trainer does what callbacks are not told of."""
    own = getattr(type(trainer), method, None)
    if own is None:  # it would never be done, and nobody would know
        raise GrowpruneError(f"this Trainer has no {method}: use a version of transformers that growprune supports")

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
    raise GrowpruneError("GrowPruneCallback is for the Trainer of transformers: give it as Trainer(callbacks=[...])")


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
    """What to give a Trainer for a training of so many optimizer steps."""
    if args.max_steps <= 0 and per_epoch and steps % per_epoch == 0:
        return f"TrainingArguments(num_train_epochs={steps // per_epoch})"
    return f"TrainingArguments(max_steps={steps})"
