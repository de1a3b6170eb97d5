"""The batches of a run, wherever it stands; on a GPU each is made while the model still trains on the one before."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from growprune.engine.data_order import seed_of_epoch
from growprune.engine.recipe import Recipe
from growprune.errors import GrowpruneError


class Batches:
    """The batches of a run. Which they are depends on the seed, the branch and the epoch."""

    def __init__(self, recipe: Recipe, task: Any, device: torch.device, per_epoch: int) -> None:
        self._recipe, self._task, self._device, self._per_epoch = recipe, task, device, per_epoch
        self._open: Iterator[Any] = iter(())
        self._place: tuple[int | None, int] | None = None
        """The branch, and the iteration whose batches come next."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._prepared: tuple[tuple[int | None, int], Any] | None = None
        """The place of a batch that was made before it was asked for, and the batch."""

    def of(self, branch: int | None, iteration: int) -> Iterator[Any]:
        """Those of an iteration, made one by one; take them all before those of the next."""
        if self._prepared is not None and self._prepared[0] == (branch, iteration):
            first = self._prepared[1]
            if self._stream is not None:
                torch.cuda.current_stream().wait_stream(self._stream)
                _keep_for_stream(first, torch.cuda.current_stream())
        else:
            first = self._first(branch, iteration)
        self._prepared, self._place = None, (branch, iteration + 1)
        return itertools.chain([first], itertools.islice(self._open, self._recipe.accumulate - 1))

    def prepare(self, branch: int | None, iteration: int) -> None:
        """Make the first batch of an iteration beside what the GPU is at. Nothing happens on a CPU."""
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
                f"the task has no more batches in iteration {number + 1} of an epoch, but num_batches() promised "
                f"{self._task.num_batches()}: both must go by the same data"
            )
        return first


def _keep_for_stream(batch: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that a batch is used on another stream than it was made on."""
    if isinstance(batch, Tensor):
        if batch.is_cuda:
            batch.record_stream(stream)
    elif isinstance(batch, dict | tuple | list):
        for item in batch.values() if isinstance(batch, dict) else batch:
            _keep_for_stream(item, stream)
