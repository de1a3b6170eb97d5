"""Training, one iteration at a time: its batches, its learning rate, and the forward and backward pass.

Replicas split each batch. On a GPU a batch is made while the model still trains on the previous one.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from growprune.engine.mesh import Mesh
from growprune.engine.recipe import Recipe
from growprune.errors import GrowpruneError
from growprune.masks.ranking import salt_of
from growprune.plan import ScheduledPhase
from growprune.sparse.model import SparseModel
from growprune.sparse.rng import seed_all
from growprune.tasks.task import map_tensors, num_examples


class Batches:
    """The batches of a run. They depend on the seed, the branch and the epoch."""

    def __init__(self, recipe: Recipe, task: Any, device: torch.device, per_epoch: int) -> None:
        self._recipe, self._task, self._device, self._per_epoch = recipe, task, device, per_epoch
        self._open: Iterator[Any] = iter(())
        self._place: tuple[int | None, int] | None = None
        """The branch, and the iteration whose batches come next."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._prepared: tuple[tuple[int | None, int], Any] | None = None
        """The place of a batch that was made before it was asked for, and the batch."""

    def of(self, branch: int | None, iteration: int) -> Iterator[Any]:
        """Yield the batches of an iteration. Use them all before asking for the next iteration."""
        if self._stream is not None and self._prepared is not None and self._prepared[0] == (branch, iteration):
            first = self._prepared[1]
            torch.cuda.current_stream().wait_stream(self._stream)
            for leaf in tree_leaves(first):
                if isinstance(leaf, Tensor) and leaf.is_cuda:  # tell the allocator that this stream uses it too
                    leaf.record_stream(torch.cuda.current_stream())
        else:
            first = self._first(branch, iteration)
        self._prepared, self._place = None, (branch, iteration + 1)
        return itertools.chain([first], itertools.islice(self._open, self._recipe.accumulate - 1))

    def prepare(self, branch: int | None, iteration: int) -> None:
        """Make the first batch of an iteration while the GPU is busy. Does nothing on a CPU."""
        if self._stream is not None and self._place == (branch, iteration):
            with torch.cuda.stream(self._stream):
                self._prepared = (branch, iteration), self._first(branch, iteration)

    def _first(self, branch: int | None, iteration: int) -> Any:
        epoch, number = divmod(iteration, self._per_epoch)
        if self._place != (branch, iteration) or number == 0:
            seed = seed_of_epoch(self._recipe.seed, branch, epoch)
            start = number * self._recipe.accumulate
            self._open = iter(self._task.batches(seed=seed, start=start, device=self._device))
        first = next(self._open, None)
        if first is None:
            raise GrowpruneError(
                f"batches() of the task ended in iteration {number + 1} of an epoch, but num_batches() returned "
                f"{self._task.num_batches()}. Both must count the same batches"
            )
        return first


def seed_of_epoch(seed: int, branch: int | None, epoch: int) -> int:
    """The seed for the order and the augmentation of an epoch."""
    return salt_of(seed, "data", branch, epoch) >> 1


def fingerprint(recipe: Recipe, num_batches: int) -> dict[str, Any]:
    """The number of batches of an epoch, and a digest of the first batch as made on a CPU.

    Runs with the same data, batch size, augmentation and seed have the same fingerprint, whatever their method.
    """
    seed = seed_of_epoch(recipe.seed, None, 0)
    first = next(iter(recipe.task.batches(seed=seed, start=0, device=torch.device("cpu"))), None)
    text = hashlib.sha256(digest(first).encode()).hexdigest()
    return {"num_batches": num_batches, "first_batch": text[:16]}


def split(batch: Any, index: int, count: int) -> tuple[Any, float]:
    """A replica's examples of a batch (every count-th from `index` on), and their fraction of the batch.

    A replica without examples gets one of another replica, which has no weight in the loss.
    """
    if count == 1:
        return batch, 1.0
    total = num_examples(batch)
    size = len(range(index, total, count))
    taken = slice(index, None, count) if size else slice(0, 1)
    return map_tensors(lambda tensor: tensor[taken], batch), size / total


def digest(batch: Any) -> str:
    """A string that is equal for equal batches."""
    if isinstance(batch, Tensor):
        return hashlib.sha256(batch.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    items = batch.items() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else None
    return repr(batch) if items is None else repr([digest(item) for item in items])


class TrainingDiverged(RuntimeError):
    """The loss became nan or infinite."""


class Training:
    """Trains a sparse model through the phases of a plan, one iteration at a time."""

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
        task = recipe.task if mesh.replicas == 1 else recipe.task.for_replica(mesh.replica, mesh.replicas)
        self._batches = Batches(recipe, task, device, per_epoch)
        is_compiled = recipe.compile and device.type == "cuda" and mesh.data_group is None
        self._compiled = torch.compile(self.loss, dynamic=False) if is_compiled else self.loss
        self._wrapped: nn.Module | None = None
        self._parameters: list[int] = []
        """Ids of the parameters of the wrapped model."""
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr = 0.0
        """The learning rate of the last iteration."""
        self.num_examples = 0
        """Number of examples of the last iteration, over all replicas."""
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._num_losses = 0
        self._was_branch = False

    def enter(self, scheduled: ScheduledPhase) -> None:
        """Begin a phase, after its edits."""
        is_apart = scheduled.branch is not None or self._was_branch
        if is_apart:  # it does not matter who trains a branch, or what ran before
            seed_all(self.recipe.seed, "phase", scheduled.stage, scheduled.branch)
        if is_apart or scheduled.phase.restart:  # machines that part or combine have no common optimizer state
            self.optimizer = None
        self._was_branch = scheduled.branch is not None
        if scheduled.phase.is_trained and self.optimizer is None:
            self._build_optimizer()

    def iterate(self, scheduled: ScheduledPhase, done: int) -> None:
        """Train one iteration of a phase with `done` finished iterations."""
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
            self.check_finite(scheduled, done)

    def _add_gradients(self, batches: Iterator[Any]) -> Tensor:
        """Compute the gradients of all batches of an iteration, and return the mean loss."""
        if self.recipe.accumulate == 1:
            batch = next(batches)
            self.num_examples = num_examples(batch) or 1
            return self._backward(batch, 1)
        weights, loss_sum = [], torch.zeros_like(self._loss_sum)
        self.num_examples = 0
        for batch in batches:
            self.num_examples += num_examples(batch) or 1
            weights.append(self.recipe.task.weigh(batch))
            loss_sum += self._backward(batch, weights[-1])
        for parameter in self.sparse.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= sum(weights)
        return loss_sum / sum(weights)

    def _backward(self, batch: Any, weight: Any) -> Tensor:
        """Return the weighted loss, summed over replicas, and add its gradients to those of the parameters."""
        if self.mesh.data_group is None:
            # in this thread: a thread of autograd's own delays short steps (docs/memory.md)
            with torch.autograd.set_multithreading_enabled(False):
                compute = self.loss if self.sparse.gradients.is_watching else self._compiled
                mean: Tensor = compute(batch) * weight
                mean.backward()  # type: ignore[no-untyped-call]
            return mean.detach().double()
        from growprune.engine.replicas import counting

        mine, share = split(batch, self.mesh.replica, self.mesh.replicas)
        with self.mesh.waiting("adding up gradients over replicas"), counting(share > 0):
            loss = self._loss(self._over_replicas(), mine) * weight * share
            (loss * self.mesh.replicas).backward()  # which replicas average
        return self.mesh.sum_over_replicas(loss.detach().double())

    def loss(self, batch: Any) -> Tensor:
        """The loss of a batch, before the backward pass."""
        return self._loss(self.sparse.model, batch)

    def _loss(self, forward: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.precision == "bf16"):
            return self.recipe.task.loss(forward, batch)

    def _over_replicas(self) -> nn.Module:
        """The model of a replica, wrapped in DistributedDataParallel. Wrapped anew if parameters changed."""
        if self.sparse.ranks is not None:
            return self.sparse.model
        parameters = [id(parameter) for parameter in self.sparse.model.parameters()]
        if self._wrapped is None or parameters != self._parameters:
            self.unwrap()
            if self.recipe.sync_batchnorm:
                from growprune.engine.replicas import synchronise

                synchronise(self.sparse.model, self.mesh.data_group)
            with self.mesh.waiting("comparing the models of replicas"):
                self._wrapped = DistributedDataParallel(self.sparse.model, process_group=self.mesh.data_group)
            self._parameters = parameters
        return self._wrapped

    def unwrap(self) -> None:
        """Remove what replicas added to the model, because an edit may replace parameters that it holds."""
        if self._wrapped is not None:
            from growprune.engine.replicas import part

            self._wrapped = None
            part(self.sparse.model)

    def first_losses(self) -> list[Callable[[], Tensor]]:
        """Functions that compute the losses of the batches of the first iteration. Their sum is its loss.

        Every replica computes whole batches, so that BatchNorm and second derivatives (GraSP) are as in one process.
        """
        batches = list(Batches(self.recipe, self.recipe.task, self.device, self.per_epoch).of(None, 0))
        weights = [self.recipe.task.weigh(batch) for batch in batches]
        return [partial(self._share_of_loss, b, w / sum(weights)) for b, w in zip(batches, weights, strict=True)]

    def _share_of_loss(self, batch: Any, share: float | Tensor) -> Tensor:
        return self.loss(batch) * share

    def shown_loss(self) -> float | None:
        """The mean loss of the epoch so far. Reading it waits for a GPU."""
        return float(self._loss_sum) / self._num_losses if self._num_losses else None

    @torch.no_grad()
    def evaluate(self, split: Literal["validation", "test"]) -> dict[str, float]:
        """The metrics of the current model on a split of the task's data."""
        task, model = self.recipe.task, self.sparse.model.eval()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.precision == "bf16"):
            metrics = task.evaluate(model, split, device=self.device)
        if task.metric not in metrics:
            raise GrowpruneError(
                f"evaluate() of the task must return its metric {task.metric!r}, got {', '.join(metrics)}"
            )
        return {name: float(value) for name, value in metrics.items()}  # tensors and numpy's numbers too

    def end_epoch(self) -> float:
        """End the epoch and return its mean loss."""
        mean = float(self._loss_sum) / max(1, self._num_losses)
        self._loss_sum.zero_()
        self._num_losses = 0
        return mean

    def _build_optimizer(self) -> torch.optim.Optimizer:
        self.optimizer = self.sparse.attach(self.recipe.optimizer.build(self.sparse.model))
        return self.optimizer

    def learning_rate(self, scheduled: ScheduledPhase, done: int) -> float:
        span, factor = self.spans[scheduled.index], self.recipe.lr_schedule.factor
        iteration = span.start + done - span.schedule_start
        return self.recipe.optimizer.lr * factor(iteration, total=span.schedule_length, per_epoch=self.per_epoch)

    def check_finite(self, scheduled: ScheduledPhase, done: int) -> None:
        """Raise if any loss of the epoch so far was not finite. Cheap on a CPU, but waits for a GPU."""
        loss_sum = float(self._loss_sum)
        if not math.isfinite(loss_sum):
            epoch = (self.spans[scheduled.index].start + done) // self.per_epoch + 1
            raise TrainingDiverged(
                f"the loss became {loss_sum} in {scheduled}, epoch {epoch} of the run, at learning rate {self.lr:.3g}. "
                f"Lower optimizer.lr, increase lr_schedule.warmup_epochs, or set clip"
            )

    def state_dict(self, device: str | None = None) -> dict[str, Any]:
        """The state to resume from. Its tensors belong on the device."""
        return {
            "optimizer": None if self.optimizer is None else self.sparse.live_state(self.optimizer, device),
            "was_branch": self._was_branch,
            "loss_sum": float(self._loss_sum),
            "num_losses": self._num_losses,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loss_sum = torch.tensor(state["loss_sum"], dtype=torch.float64, device=self.device)
        self._num_losses, self._was_branch = state["num_losses"], state["was_branch"]
        self.optimizer = None
        if state["optimizer"] is not None:
            self.sparse.load_live_state(self._build_optimizer(), state["optimizer"])


@dataclass(frozen=True)
class Span:
    """The iterations of a phase. Branches of a fork count in parallel, on any number of machines."""

    start: int
    length: int
    schedule_start: int = 0
    """First iteration of the learning-rate schedule that the phase belongs to."""
    schedule_length: int = 0


def timeline(schedule: Sequence[ScheduledPhase], per_epoch: int) -> list[Span]:
    """The span of each phase. A learning-rate schedule runs from one restart to the next."""
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
    """Number of iterations that one process trains before each phase. The last entry is the total.

    Args:
        is_local: True for the branches of a fork that the process trains.
    """
    mine = (scheduled.branch is None or is_local(scheduled.branch) for scheduled in schedule)
    return [0, *accumulate(span.length if is_mine else 0 for span, is_mine in zip(spans, mine, strict=True))]
