"""The base class of every task."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

Split = Literal["validation", "test"]


class Task(ABC):
    """What is trained: data, a model, a loss and a metric. Derive a frozen dataclass of settings from it.

    Its fields can be set from the command line. A task that reads files has a field `data: str = ""`, the folder given
    with `--data`. Building the model and its example needs no data, and works on the meta device.

    The methods without a default must be written; the others have one that suits most tasks.
    """

    metric: str
    """The name of the number, among those `evaluate` returns, that says how good a model is."""

    lower_is_better: bool = False
    """Whether a better model has less of it, as of a loss, or more, as of an accuracy."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """A freshly initialised model; the engine seeds torch before."""

    @abstractmethod
    def example(self) -> Any:
        """One input of the model, in a batch of one, to count FLOPs with."""

    @abstractmethod
    def num_batches(self) -> int:
        """How many batches an epoch has; called first of all, so what is wrong with the data is said here.

        It may be called often: what is slow is done once.
        """

    @abstractmethod
    def batches(self, *, seed: int, start: int, device: torch.device) -> Iterator[Any]:
        """The batches of an epoch from number `start` on; which they are depends on the seed alone.

        The seed is a whole number from 0 to below 2**63, which torch.Generator and numpy.random.default_rng both take.

        A batch is a tensor, or a tuple, list or dict of tensors whose first axis counts the examples: replicas take
        every n-th example of each. What is drawn for batch i, such as its augmentation, is drawn from (seed, i), so
        that an epoch can be entered anywhere.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch, as a mean over its examples, so that the losses of its shares add up to it."""

    @abstractmethod
    def evaluate(self, model: nn.Module, split: Split, *, device: torch.device) -> dict[str, float]:
        """Metrics of a model in eval mode on data it was not trained on."""

    initialises_modules: bool = False
    """Whether `initialise` is all that gives the model its first weights. It is then built module by module, and, where
    it begins sparse, without ever being dense."""

    def initialise(self, module: nn.Module) -> None:
        """Give one module's own parameters and buffers, all of them, their first values."""
        method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        assert method is not None, f"{type(module).__name__} has no reset_parameters"
        method()

    def weigh(self, batch: Any) -> int | Tensor:
        """What a batch counts among those that are accumulated: its examples, or what else its loss is a mean over."""
        return num_examples(batch) or 1

    def for_replica(self, index: int, count: int) -> Task:
        """The task as replica `index` of `count` needs it.

        Where making an example is costly, its batches may have blank ones in the places of all but the examples
        number index, index + count, ...; their shapes stay the same.
        """
        del index, count
        return self

    def files(self) -> dict[str, bytes]:
        """What the task makes of its data without which a model is of no use, such as a vocabulary, by file name.

        It is kept in the run folder, and must be the same when the run is resumed.
        """
        return {}

    @property
    def signature(self) -> str:
        """How the metric is counted, if there are several ways; goes to `result.json`."""
        return ""

    @property
    def reads_files(self) -> bool:
        """Whether `--data` says where its files are, that is, whether it has a field `data`."""
        return dataclasses.is_dataclass(self) and "data" in {field.name for field in dataclasses.fields(self)}


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """A batch with each of its tensors replaced by what a function gives for it; all else stays."""
    if isinstance(batch, dict):
        return {name: map_tensors(function, item) for name, item in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(map_tensors(function, item) for item in batch)
    return function(batch) if isinstance(batch, Tensor) else batch


def leaves_of(batch: Any) -> Iterator[Any]:
    """The tensors of a batch, and what else is in it, one after the other."""
    if isinstance(batch, dict | tuple | list):
        for item in batch.values() if isinstance(batch, dict) else batch:
            yield from leaves_of(item)
    else:
        yield batch


def num_examples(batch: Any) -> int:
    """How long the first tensor of a batch is that has a length.

    >>> num_examples((7, {"image": torch.zeros(5, 3)}))
    5
    """
    tensors = (leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor))
    return next((len(tensor) for tensor in tensors if tensor.dim() and len(tensor)), 0)
