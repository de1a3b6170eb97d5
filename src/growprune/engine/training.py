"""One phase of training, an iteration at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from growprune.engine import batchnorm
from growprune.engine.batch_split import split
from growprune.engine.mesh import Mesh
from growprune.engine.recipe import Recipe
from growprune.engine.rng import seed_all
from growprune.plan import Plan, ScheduledPhase, walk
from growprune.scores import salt_of
from growprune.sparse import SparseModel


class TrainingDiverged(RuntimeError):
    """The loss is no longer a number."""


@dataclass
class Cursor:
    """Where in a phase training stands."""

    epoch: int = 0
    batch: int = 0
    """How many batches of the epoch are done."""
    iteration: int = 0
    """How many steps the optimizer has taken in the phase."""
    loss_sum: float = 0.0
    """Over the iterations of the epoch so far."""
    num_losses: int = 0


class Training:
    """Trains a sparse model through the phases of a plan, one iteration at a time."""

    def __init__(self, recipe: Recipe, plan: Plan, sparse: SparseModel, device: torch.device, mesh: Mesh) -> None:
        self.recipe, self.plan, self.sparse, self.device, self.mesh = recipe, plan, sparse, device, mesh
        self._task = recipe.task.for_replica(mesh.replica, mesh.replicas) if mesh.replicas > 1 else recipe.task
        self._forward: nn.Module | None = None
        self.cursor = Cursor()
        self.optimizer: torch.optim.Optimizer | None = None
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._was_branch = False

    def train(
        self, scheduled: ScheduledPhase, on_epoch: Callable[[ScheduledPhase, float, float], None]
    ) -> Iterator[None]:
        """Train a phase from where the cursor stands; yields after each iteration, when all is consistent.

        Args:
            on_epoch: called with the phase, the mean loss and the learning rate when an epoch is over.
        """
        if self.cursor == Cursor():
            self._begin(scheduled)
        while self.cursor.epoch < scheduled.phase.epochs:
            for batches in self._iterations(scheduled):
                self._iterate(batches, scheduled)
                yield
            self.check_finite(scheduled)
            on_epoch(scheduled, self.cursor.loss_sum / max(1, self.cursor.num_losses), self._lr(scheduled))
            self.cursor = Cursor(epoch=self.cursor.epoch + 1, iteration=self.cursor.iteration)
            self._loss_sum.zero_()
        self._was_branch = scheduled.branch is not None
        self._unwrap()

    def next_phase(self) -> None:
        """Put the cursor at the start of the phase to come."""
        self.cursor = Cursor()
        if self.recipe.restart:
            self.optimizer = None  # before the edits, which would take its state along

    def _begin(self, scheduled: ScheduledPhase) -> None:
        # A phase is a function of (seed, step, branch), so it does not matter who trains it, or what ran before.
        seed_all(self.recipe.seed, "phase", scheduled.stage, scheduled.branch)
        # Machines that part, and machines that have combined, have no common optimizer state to go on with.
        if self.recipe.restart or scheduled.branch is not None or self._was_branch or self.optimizer is None:
            self.optimizer = None
        if scheduled.phase.epochs and self.optimizer is None:
            self.optimizer = self._build_optimizer()

    def _build_optimizer(self) -> torch.optim.Optimizer:
        return self.sparse.attach(self.recipe.optimizer.build(self.sparse.model))

    def _iterations(self, scheduled: ScheduledPhase) -> Iterator[Iterator[Any]]:
        """The batches of the current epoch from where the cursor stands, `accumulate` at a time, made one by one."""
        seed = salt_of(self.recipe.seed, "data", scheduled.stage, scheduled.branch, self.cursor.epoch) >> 1
        batches = iter(self._task.batches(seed=seed, start=self.cursor.batch, device=self.device))
        for first in batches:
            yield itertools.chain([first], itertools.islice(batches, self.recipe.accumulate - 1))

    def _iterate(self, batches: Iterator[Any], scheduled: ScheduledPhase) -> None:
        optimizer, model = self.optimizer, self.sparse.model
        assert optimizer is not None
        for parameters in optimizer.param_groups:
            parameters["lr"] = self._lr(scheduled)
        model.train()
        weights, loss_sum = [], torch.zeros_like(self._loss_sum)
        for batch in batches:
            weights.append(self._weigh(batch))
            loss_sum += self._add_gradients(batch, weights[-1])
        self._loss_sum += loss_sum / sum(weights)
        if self.recipe.accumulate > 1:
            self._divide_gradients(sum(weights))
        if self.recipe.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.recipe.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._count(len(weights), scheduled)

    def _weigh(self, batch: Any) -> Any:
        """What a batch counts among those of an iteration, whose loss is a mean over all examples, or tokens."""
        return 1 if self.recipe.accumulate == 1 else self.recipe.task.weigh(batch)

    def _add_gradients(self, batch: Any, weight: Any) -> Tensor:
        """Add those of a batch to the parameters' own; returns its loss, times its weight."""
        forward = self._wrapped()
        mine, share = split(batch, self.mesh.replica, self.mesh.replicas)
        with self.mesh.waiting("adding up gradients over replicas"), batchnorm.counting(share > 0):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.precision == "bf16"):
                loss = self.recipe.task.loss(forward, mine) * weight * share
            (loss * self.mesh.replicas).backward()  # which replicas average
        return self.mesh.sum_over_replicas(loss.detach().double())

    def _divide_gradients(self, total: Any) -> None:
        for parameter in self.sparse.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= total

    def _wrapped(self) -> nn.Module:
        """The model, or what keeps the gradients of its replicas the same."""
        if self.mesh.data_group is None:
            return self.sparse.model
        if self._forward is None:
            if self.recipe.sync_batchnorm:
                batchnorm.synchronise(self.sparse.model, self.mesh.data_group)
            with self.mesh.waiting("comparing the models of replicas"):
                self._forward = DistributedDataParallel(self.sparse.model, process_group=self.mesh.data_group)
        return self._forward

    def _unwrap(self) -> None:
        """Before edits, which may give layers new parameters, and copies, which cannot take a process group along."""
        self._forward = None
        batchnorm.part(self.sparse.model)

    def _count(self, num_batches: int, scheduled: ScheduledPhase) -> None:
        cursor = self.cursor
        cursor.batch += num_batches
        cursor.iteration += 1
        cursor.num_losses += 1
        if self.device.type == "cpu" or cursor.iteration % 20 == 0:  # reading the loss off a GPU makes it wait
            self.check_finite(scheduled)

    def check_finite(self, scheduled: ScheduledPhase) -> None:
        """Raise if any loss of the epoch so far was not finite; cheap on a CPU, a wait on a GPU."""
        self.cursor.loss_sum = float(self._loss_sum)
        if not math.isfinite(self.cursor.loss_sum):
            raise TrainingDiverged(
                f"the loss became {self.cursor.loss_sum} in step {scheduled.stage} ({scheduled.phase}), epoch "
                f"{self.cursor.epoch + 1}, at learning rate {self._lr(scheduled):.3g}: "
                f"lower optimizer.lr, lengthen lr_schedule.warmup_epochs, or set clip"
            )

    def _lr(self, scheduled: ScheduledPhase) -> float:
        per_epoch = math.ceil(self.recipe.task.num_batches() / self.recipe.accumulate)
        before, epochs = (0, scheduled.phase.epochs) if self.recipe.restart else self._epochs_before(scheduled)
        iteration = before * per_epoch + self.cursor.iteration
        lr_schedule = self.recipe.lr_schedule.factor(iteration, total=epochs * per_epoch, per_epoch=per_epoch)
        return self.recipe.optimizer.lr * lr_schedule

    def _epochs_before(self, scheduled: ScheduledPhase) -> tuple[int, int]:
        """Epochs of the plan's steps before this one, and of all; the branches of a fork run side by side."""
        epochs = {s.stage: s.phase.epochs for s in walk(self.plan)}
        return sum(n for step, n in epochs.items() if step < scheduled.stage), sum(epochs.values())

    def state_dict(self) -> dict[str, Any]:
        return {
            "cursor": asdict(self.cursor),
            "optimizer": None if self.optimizer is None else self.sparse.optimizer_state(self.optimizer),
            "was_branch": self._was_branch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor = Cursor(**state["cursor"])
        self._loss_sum = torch.tensor(self.cursor.loss_sum, dtype=torch.float64, device=self.device)
        self._was_branch = state["was_branch"]
        self.optimizer = None
        if state["optimizer"] is not None:
            self.optimizer = self._build_optimizer()
            self.sparse.load_optimizer_state(self.optimizer, state["optimizer"])
