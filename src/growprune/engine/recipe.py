"""A recipe: everything that decides a run, as one frozen value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from torch import nn

from growprune.engine.checks import check_choices, require
from growprune.engine.device import check_device
from growprune.engine.optim import LRSchedule, OptimizerConfig
from growprune.errors import GrowpruneError
from growprune.partition import Partition
from growprune.plan import Parts, Plan, check_counts
from growprune.sparse import SparseModel
from growprune.tasks.task import Task

SHARED = ("sparsity", "kappa", "seed")
"""Fields of a recipe that its method is given too, if it takes them."""


@dataclass(frozen=True)
class Recipe:
    """Write one as a function that returns it; derive another with `dataclasses.replace`."""

    task: Task
    method: Callable[..., Plan]
    options: Mapping[str, Any]
    """The method's own arguments, such as steps, epochs and finetune."""
    sparsity: float = 0.0
    kappa: int = 4
    """The number of parts, cut automatically, unless `parts` says how."""
    parts: tuple[tuple[str, ...], ...] = ()
    """The parts by hand: for each, the names of its modules."""
    allocation: str = "uniform"
    pattern: str = "unstructured"
    scope: str = "model"
    keep_dense: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    storage: str = "masked"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LRSchedule = field(default_factory=LRSchedule)
    restart: bool = True
    """True (the paper): every phase has a fresh optimizer and the whole learning-rate lr_schedule.
    False: one curve over the whole plan, and optimizer state kept for the weights that survive."""
    clip: float | None = None
    """The largest norm of the gradient; None for any."""
    accumulate: int = 1
    """Batches to an iteration."""
    precision: Literal["fp32", "bf16"] = "fp32"
    evaluate_every: int = 1
    """Validate after each so many epochs of a phase, and after its last."""
    candidates: bool = True
    """After each step, evaluate what the model would be if pruned now, on validation data, and keep the best."""
    seed: int = 0
    device: str = "auto"
    """"auto" for a GPU if there is one, or as torch names it: "cpu", "cuda", "cuda:1"."""
    replicas: int = 0
    """Under torchrun: how many processes share each batch. 0: one for each branch of a fork; all without forks."""
    sync_batchnorm: bool = True
    """Whether BatchNorm sees the examples of all replicas, as in one process, or only its own, which is faster."""
    timeout_seconds: float = 600.0
    """Under torchrun: how long to wait for another process."""
    checkpoint_seconds: float = 60.0
    """The time between checkpoints; there is one after every phase of training too. No influence on results."""
    claim: str = ""
    """What the recipe is expected to reach, and where."""

    def __post_init__(self) -> None:
        is_task = isinstance(self.task, Task) and is_dataclass(self.task)
        require(is_task, "task", self.task, "of a frozen dataclass derived from growprune.tasks.Task")
        check_choices(self)
        check_device(self.device)
        check_counts(1, accumulate=self.accumulate, evaluate_every=self.evaluate_every)
        check_counts(0, replicas=self.replicas)
        require(self.clip is None or self.clip > 0, "clip", self.clip, "above 0, or None for no clipping")
        self._check_options()

    def _check_options(self) -> None:
        known = own_options(self.method)
        for name, value in self.options.items():
            if name in SHARED:  # the plan would go by the option, and the model by the field
                raise GrowpruneError(f"options has {name}={value!r}: set the recipe's own field: {name}={value!r}")
            if name not in known:
                raise GrowpruneError(f"{self.method.__name__} has no option {name!r}; it takes {', '.join(known)}")

    def plan(self, model: nn.Module) -> Plan:
        """The recipe's plan for a model. A method that takes `kappa` draws its own parts from the finest partition."""
        return self.plan_over(self.partition(model))

    def plan_over(self, parts: Parts) -> Plan:
        """The recipe's plan for a partition of any model."""
        signature = inspect.signature(self.method)
        options = {name: getattr(self, name) for name in SHARED if name in signature.parameters} | dict(self.options)
        try:
            signature.bind(parts, **options)  # before calling it, since a method may have errors of its own
        except TypeError as error:
            raise GrowpruneError(f"{self.method.__name__}: {error}; give it with options") from error
        return self.method(parts, **options)

    def partition(self, model: nn.Module) -> Partition:
        if "kappa" in inspect.signature(self.method).parameters:
            return Partition.per_layer(model, keep_dense=self.keep_dense)
        if self.parts:
            return Partition.of(model, self.parts)
        return Partition.contiguous(model, self.kappa, keep_dense=self.keep_dense)

    def sparse_model(self, model: nn.Module) -> SparseModel:
        return SparseModel(
            model,
            sparsity=self.sparsity,
            allocation=self.allocation,
            pattern=self.pattern,
            scope=self.scope,
            keep_dense=self.keep_dense,
            include=self.include,
            seed=self.seed,
            storage=self.storage,
        )

    def extended(self, steps: int) -> Recipe:
        """The same recipe with a longer search."""
        check_counts(1, extend=steps)
        if "steps" not in self.options:
            raise GrowpruneError(f"method {self.method.__name__} has no steps to extend")
        return replace(self, options={**self.options, "steps": self.options["steps"] + steps})


def own_options(method: Callable[..., Plan]) -> list[str]:
    """What a method takes beside the partition and what the recipe itself says."""
    return [name for name in list(inspect.signature(method).parameters)[1:] if name not in SHARED]


def describe(value: Any) -> Any:
    """A recipe, or anything in one, as plain JSON values; functions by their names."""
    if is_dataclass(value) and not isinstance(value, type):
        named = {} if isinstance(value, Recipe | OptimizerConfig | LRSchedule) else {"name": type(value).__name__}
        return named | {f.name: describe(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): describe(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [describe(item) for item in value]
    return value.__name__ if callable(value) else value
