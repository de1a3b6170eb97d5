"""Learning rates under the Trainer of transformers: the whole schedule for each phase that begins it anew."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import SGD
from transformers import get_scheduler

from growprune.sparse.cursor import Cursor


def has_restarts(cursor: Cursor) -> bool:
    return any(scheduled.phase.restart for scheduled in cursor.schedule)


def restarts(cursor: Cursor) -> list[int]:
    """The steps at which the learning-rate schedule begins, and, last, where the plan ends."""
    bounds, step = [0], 0
    for scheduled in cursor.schedule:
        bounds += [step] if scheduled.phase.restart and step > bounds[-1] else []
        step += cursor.length_of(scheduled.phase)
    return [*bounds, step]


def restart_rates(args: Any, scheduler: Any, bounds: Sequence[int]) -> None:
    """Have the whole schedule between each two bounds."""
    factor = _factor(args, bounds)
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
    """That of the schedule that TrainingArguments ask for, for so many steps."""
    nothing = SGD([nn.Parameter()], lr=args.learning_rate)
    warmup = args.get_warmup_steps(length)
    made = get_scheduler(args.lr_scheduler_type, nothing, warmup, length, args.lr_scheduler_kwargs)
    factor: Callable[[int], float] = made.lr_lambdas[0]
    return factor
