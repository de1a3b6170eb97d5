"""The batches of a run, how replicas split them, and a fingerprint to compare the data of two runs.

On a GPU each batch is made while the model still trains on the previous one.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from growprune.engine.recipe import Recipe
from growprune.errors import GrowpruneError
from growprune.masks.ranking import salt_of
from growprune.tasks.task import leaves_of, map_tensors, num_examples


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
        if self._prepared is not None and self._prepared[0] == (branch, iteration):
            first = self._prepared[1]
            if self._stream is not None:
                torch.cuda.current_stream().wait_stream(self._stream)
                for leaf in leaves_of(first):
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
