"""Training: one iteration after another, with the batches and the learning rate that belong to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn

from growprune.engine.backward import Backward
from growprune.engine.batches import Batches
from growprune.engine.mesh import Mesh
from growprune.engine.recipe import Recipe
from growprune.plan import ScheduledPhase
from growprune.sparse.model import SparseModel
from growprune.sparse.rng import seed_all
from growprune.tasks.task import num_examples


class TrainingDiverged(RuntimeError):
    """The loss is no longer a number."""


class Training:
    """Trains a sparse model through the phases of a plan, one iteration at a time.

    Args:
        per_epoch: how many iterations an epoch has.
    """

    def __init__(
        self,
        recipe: Recipe,
        schedule: Sequence[ScheduledPhase],
        sparse: SparseModel,
        device: torch.device,
        mesh: Mesh,
        per_epoch: int,
    ) -> None:
        self.recipe, self.sparse, self.device, self.mesh = recipe, sparse, device, mesh
        self.per_epoch = per_epoch
        self.spans = timeline(schedule, per_epoch)
        self.backward = Backward(recipe, sparse, device, mesh)
        task = recipe.task if mesh.replicas == 1 else recipe.task.for_replica(mesh.replica, mesh.replicas)
        self._batches = Batches(recipe, task, device, per_epoch)
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr = 0.0
        """The learning rate of the last iteration."""
        self.num_examples = 0
        """How many the last iteration had, those of all replicas."""
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._num_losses = 0
        self._late_sum, self._shown_sum, self._num_shown = LateReader(device), LateReader(device), 0
        self._was_branch = False

    def enter(self, scheduled: ScheduledPhase) -> None:
        """Begin a phase, whose edits are done."""
        if scheduled.branch is not None or self._was_branch:
            # It does not matter who trains a branch, or what ran before; and machines that part, and machines that have
            # combined, have no common optimizer state to go on with.
            seed_all(self.recipe.seed, "phase", scheduled.stage, scheduled.branch)
            self.optimizer = None
        if scheduled.phase.restart:
            self.optimizer = None
        self._was_branch = scheduled.branch is not None
        if scheduled.phase.is_trained and self.optimizer is None:
            self.optimizer = self._build_optimizer()

    def iterate(self, scheduled: ScheduledPhase, done: int) -> None:
        """Train one iteration of a phase of which so many are done."""
        optimizer, model = self.optimizer, self.sparse.model
        assert optimizer is not None
        iteration = self.spans[scheduled.index].start + done
        self.lr = self.learning_rate(scheduled, done)
        for group in optimizer.param_groups:
            group["lr"] = self.lr
        model.train()
        self._loss_sum += self._add_gradients(self._batches.of(scheduled.branch, iteration))
        if self.recipe.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.recipe.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if done + 1 < self.spans[scheduled.index].length or scheduled.index < len(self.spans) - 1:
            self._batches.prepare(scheduled.branch, iteration + 1)
        self._num_losses += 1
        if self.device.type == "cpu" or self._num_losses % 20 == 0:
            self._check(scheduled, done, self._late_sum.read(self._loss_sum))

    def _add_gradients(self, batches: Iterator[Any]) -> Tensor:
        """Those of all batches of an iteration; returns their mean loss."""
        if self.recipe.accumulate == 1:
            batch = next(batches)
            self.num_examples = num_examples(batch) or 1
            return self.backward(batch, 1)
        weights, loss_sum = [], torch.zeros_like(self._loss_sum)
        self.num_examples = 0
        for batch in batches:
            self.num_examples += num_examples(batch) or 1
            weights.append(self.recipe.task.weigh(batch))
            loss_sum += self.backward(batch, weights[-1])
        for parameter in self.sparse.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= sum(weights)
        return loss_sum / sum(weights)

    def first_losses(self) -> list[Callable[[], Tensor]]:
        """Functions that compute the losses of the first iteration's batches, which add up to that of the iteration.

        Of the whole batches on every replica: BatchNorm and second derivatives (GraSP) then are as in one process.
        """
        batches = list(Batches(self.recipe, self.recipe.task, self.device, self.per_epoch).of(None, 0))
        weights = [self.recipe.task.weigh(batch) for batch in batches]
        return [partial(self._share_of_loss, b, w / sum(weights)) for b, w in zip(batches, weights, strict=True)]

    def _share_of_loss(self, batch: Any, share: float | Tensor) -> Tensor:
        return self.backward.loss(batch) * share

    def shown_loss(self) -> float | None:
        """The mean loss of the epoch, on a GPU as it was when this was last asked."""
        total, self._num_shown, num = self._shown_sum.read(self._loss_sum), self._num_losses, self._num_shown
        num = num if self.device.type == "cuda" else self._num_losses
        return total / num if num else None

    def end_epoch(self) -> float:
        """The mean loss of the epoch, which is over."""
        mean = float(self._loss_sum) / max(1, self._num_losses)
        self._loss_sum.zero_()
        self._num_losses = 0
        return mean

    def _build_optimizer(self) -> torch.optim.Optimizer:
        return self.sparse.attach(self.recipe.optimizer.build(self.sparse.model))

    def learning_rate(self, scheduled: ScheduledPhase, done: int) -> float:
        span, schedule = self.spans[scheduled.index], self.recipe.lr_schedule
        iteration = span.start + done - span.schedule_start
        return self.recipe.optimizer.lr * schedule.factor(
            iteration, total=span.schedule_length, per_epoch=self.per_epoch
        )

    def check_finite(self, scheduled: ScheduledPhase, done: int) -> None:
        """Raise if any loss of the epoch so far was not finite; cheap on a CPU, a wait on a GPU."""
        self._check(scheduled, done, float(self._loss_sum))

    def _check(self, scheduled: ScheduledPhase, done: int, loss_sum: float) -> None:
        if not math.isfinite(loss_sum):
            epoch = (self.spans[scheduled.index].start + done) // self.per_epoch + 1
            raise TrainingDiverged(
                f"the loss became {loss_sum} in {scheduled}, epoch {epoch} of the run, at learning rate {self.lr:.3g}: "
                f"lower optimizer.lr, lengthen lr_schedule.warmup_epochs, or set clip"
            )

    def state_dict(self, device: str | None = None) -> dict[str, Any]:
        """Its state, of which tensors go to a device."""
        optimizer = self.optimizer
        return {
            "optimizer": None if optimizer is None else self.sparse.optimizer_state(optimizer, device=device),
            "was_branch": self._was_branch,
            "loss_sum": float(self._loss_sum),
            "num_losses": self._num_losses,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loss_sum = torch.tensor(state["loss_sum"], dtype=torch.float64, device=self.device)
        self._num_losses, self._was_branch = state["num_losses"], state["was_branch"]
        self.optimizer = None
        if state["optimizer"] is not None:
            self.optimizer = self._build_optimizer()
            self.sparse.load_optimizer_state(self.optimizer, state["optimizer"])


class LateReader:
    """Reads a number off a device as it was when this was last asked, since reading it right now makes a GPU wait."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._number = torch.zeros((), dtype=torch.float64, pin_memory=self._event is not None)

    def read(self, number: Tensor) -> float:
        if self._event is None:
            return float(number)
        self._event.synchronize()  # long over
        before = float(self._number)
        self._number.copy_(number, non_blocking=True)
        self._event.record()
        return before


@dataclass(frozen=True)
class Span:
    """A phase in time. The branches of a fork run side by side, however many machines there are."""

    start: int
    length: int
    schedule_start: int = 0
    """At which iteration the learning-rate schedule began that the phase is part of."""
    schedule_length: int = 0


def timeline(schedule: Sequence[ScheduledPhase], per_epoch: int) -> list[Span]:
    """The span of each phase. A learning-rate schedule goes from one phase that restarts to the next that does."""
    spans: list[Span] = []
    begins, now = [0], 0
    for _, group in groupby(schedule, key=lambda scheduled: scheduled.stage):
        phases = [scheduled.phase for scheduled in group]
        lengths = [phase.num_iterations(per_epoch) for phase in phases]
        if any(phase.restart and phase.is_trained for phase in phases) and now > begins[-1]:
            begins.append(now)
        spans += [Span(now, length, begins[-1]) for length in lengths]
        now += max(lengths, default=0)
    lengths_of = {begin: end - begin for begin, end in zip(begins, [*begins[1:], now], strict=True)}
    return [replace(span, schedule_length=lengths_of[span.schedule_start]) for span in spans]


def work_before(
    schedule: Sequence[ScheduledPhase], spans: Sequence[Span], is_local: Callable[[int], bool]
) -> list[int]:
    """How many iterations one process trains before each phase, branch after branch, and last how many in all.

    Args:
        is_local: which branches of a fork it trains.
    """
    mine = (scheduled.branch is None or is_local(scheduled.branch) for scheduled in schedule)
    return [0, *accumulate(span.length if is_mine else 0 for span, is_mine in zip(spans, mine, strict=True))]


def last_trained(schedule: Sequence[ScheduledPhase]) -> int:
    """The number of the last phase that is trained, after which others may only edit."""
    trained = [scheduled for scheduled in schedule if scheduled.phase.is_trained]
    return trained[-1].index if trained and trained[-1].branch is None else len(schedule) - 1
