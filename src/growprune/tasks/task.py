"""The base class of every task."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError

Split = Literal["validation", "test"]


class Task(ABC):
    """Base class of tasks: data, a model, a loss and a metric. Derive a frozen dataclass from it.

    `--set` can change its fields. A task that reads files has a field `data: str = ""` for the folder given with
    `--data`. Building the model and its example must work without data, and on the meta device.

    Abstract methods must be implemented. The others have a default that suits most tasks.
    """

    metric: str
    """The main metric: a key of the dict that `evaluate` returns."""

    lower_is_better: bool = False
    """True if a lower metric is better, as for a loss."""

    has_validation_data: bool = True
    """True if validation data differs from test data. `growprune compare --tune` needs it."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Build a newly initialised model. The engine seeds torch before."""

    @abstractmethod
    def example(self) -> Any:
        """Return an input of the model with batch size 1, for counting FLOPs."""

    @abstractmethod
    def num_batches(self) -> int:
        """Return the number of batches of an epoch. It is called first, so raise errors about the data here.

        It may be called often, so cache slow work.
        """

    @abstractmethod
    def batches(self, *, seed: int, start: int, device: torch.device) -> Iterator[Any]:
        """Yield the batches of an epoch from number `start` on. They must depend only on the seed.

        The seed is an integer in [0, 2**63), valid for torch.Generator and numpy.random.default_rng.

        A batch is a tensor, or a tuple, list or dict of tensors whose first axis is the examples: each replica takes
        every n-th example. Random numbers for batch i, such as its augmentation, must depend only on (seed, i), so that
        an epoch can start anywhere.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch. It must be a mean over examples, so that batches can be split."""

    @abstractmethod
    def evaluate(self, model: nn.Module, split: Split, *, device: torch.device) -> dict[str, float]:
        """Evaluate a model in eval mode on the validation or test split, and return its metrics."""

    initialises_modules: bool = False
    """True if `initialise` sets all initial weights. The model is then built module by module, and if it starts sparse,
    it is never dense in memory."""

    def initialise(self, module: nn.Module) -> None:
        """Initialise all parameters and buffers of one module, without its submodules."""
        method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        assert method is not None, f"{type(module).__name__} has no reset_parameters"
        method()

    def narrower(self) -> Sequence[Task]:
        """Return the same task with narrower models, the narrowest first. The last is the task itself.

        Comparisons choose small dense models from it. The default is for a model without a width.
        """
        return [self]

    def weigh(self, batch: Any) -> int | Tensor:
        """Return the weight of a batch in gradient accumulation: how many examples (or tokens) its loss averages."""
        return num_examples(batch) or 1

    def for_replica(self, index: int, count: int) -> Task:
        """Return the task for replica `index` of `count`.

        If examples are costly to make, its batches may have blank examples, except for numbers index, index + count,
        ... Shapes must stay the same.
        """
        del index, count
        return self

    def files(self) -> dict[str, bytes]:
        """Return files made from the data that the model needs, such as a vocabulary, by file name.

        They are stored in the run folder, and must be the same when the run is resumed.
        """
        return {}

    @property
    def signature(self) -> str:
        """A description of how the metric is computed, if there are several ways. It is stored in `result.json`."""
        return ""

    @property
    def reads_files(self) -> bool:
        """True if the task has a field `data`, which `--data` sets."""
        return dataclasses.is_dataclass(self) and "data" in {field.name for field in dataclasses.fields(self)}


def check_fields(task: Task, *, least: Mapping[str, float], rates: Sequence[str] = ()) -> None:
    """Raise unless fields are at least these values, and rates are in [0, 1)."""
    for name, limit in least.items():
        if getattr(task, name) < limit:
            raise GrowpruneError(f"{name} must be >= {limit}, got {getattr(task, name)}")
    for name in rates:
        if not 0 <= getattr(task, name) < 1:
            raise GrowpruneError(f"{name} must be in [0, 1), got {getattr(task, name)}")


def with_channels(task: Task, name: str, multiple: int = 1, *others: str) -> list[Task]:
    """Return the task with every smaller multiple of `multiple` as `name`, and the task. `others` keep their ratio."""
    assert dataclasses.is_dataclass(task)
    full = getattr(task, name)
    narrow = range(multiple, full, multiple)
    sizes = [{name: n} | {other: max(1, round(getattr(task, other) * n / full)) for other in others} for n in narrow]
    return [*(dataclasses.replace(task, **each) for each in sizes), task]


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """Apply a function to each tensor of a batch. Other values stay."""
    if isinstance(batch, dict):
        return {name: map_tensors(function, item) for name, item in batch.items()}
    if isinstance(batch, tuple | list):
        items = [map_tensors(function, item) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return function(batch) if isinstance(batch, Tensor) else batch


def num_examples(batch: Any) -> int:
    """Return the number of examples of a batch: the length of its first tensor that has one.

    >>> num_examples((7, {"image": torch.zeros(5, 3)}))
    5
    """
    tensors: list[Tensor] = []
    map_tensors(tensors.append, batch)
    return next((len(tensor) for tensor in tensors if tensor.dim() and len(tensor)), 0)


def num_cores() -> int:
    """Return the number of cores this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
