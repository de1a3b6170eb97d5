"""The protocol every task follows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

Split = Literal["validation", "test"]


class Task(Protocol):
    """A frozen dataclass of settings with these methods. Its fields can be set from the command line.

    A task that reads files has a field `data`, the folder given with `--data`. Building the model and its example needs
    no data, and works on the meta device. A task whose metric can be counted in several ways has a `signature`, a text
    that says which it was and goes to `result.json`. A task that makes something of its data without which a model is
    of no use, such as a vocabulary, has a method `files()` that returns it as bytes by file name: it is kept in the run
    folder, and must be the same when the run is resumed.
    """

    @property
    def metric(self) -> str:
        """The name of the number, among those `evaluate` returns, that a better model has more of."""

    def build_model(self) -> nn.Module:
        """A freshly initialised model; the engine seeds torch before."""

    def example(self) -> Any:
        """One input of the model, in a batch of one, to count FLOPs with."""

    def num_batches(self) -> int:
        """How many batches an epoch has; called first of all, so what is wrong with the data is said here."""

    def batches(self, *, seed: int, start: int, device: torch.device) -> Iterator[Any]:
        """The batches of an epoch from number `start` on; which they are depends on the seed alone.

        The seed is a whole number from 0 to below 2**63, which torch.Generator and numpy.random.default_rng both take.

        A batch is a tensor, or a tuple, list or dict of tensors whose first axis counts the examples: replicas take
        every n-th example of each. What is drawn for batch i, such as its augmentation, is drawn from (seed, i), so
        that an epoch can be entered anywhere.

        A task for which making an example is costly may have a method `for_replica(index, count)` that returns a task
        whose batches have the same shapes and the same examples number index, index + count, ..., and blank ones in
        the places of the others.
        """

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch, as a mean over its examples, so that the losses of its shares add up to it.

        When several batches are accumulated, each counts by its examples. A task whose loss is a mean over something
        else, such as tokens, may have a method `weigh(batch)` that says how many of these there are.
        """

    def evaluate(self, model: nn.Module, split: Split, *, device: torch.device) -> dict[str, float]:
        """Metrics of a model in eval mode on data it was not trained on."""
