"""A recipe: everything that decides a run, as one frozen value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from growprune.engine.device import check_device
from growprune.engine.optim import LRSchedule, OptimizerConfig, check_choices, require
from growprune.errors import GrowpruneError
from growprune.logs import check_names
from growprune.masks.partition import Partition
from growprune.masks.partition_kinds import Contiguous, PartitionConfig
from growprune.plan import Plan
from growprune.plan.settings import check_counts, plain
from growprune.sparse.learning_rates import parse_lr_scaling
from growprune.sparse.model import SparseModel
from growprune.tasks.task import Task

SHARED = ("sparsity", "seed")
"""Fields of a recipe that its method is given too, if it takes them."""


@dataclass(frozen=True)
class Recipe:
    """All that decides a run. Write a function that returns one; derive others with `dataclasses.replace`."""

    task: Task
    method: Callable[..., Plan]
    options: Mapping[str, Any]
    """The method's own arguments, such as steps, epochs and finetune. Where a method counts in `iterations`, `epochs`
    may be given instead."""
    weights: str = ""
    """Begin with these: a safetensors file, sparse or dense, or the folder of a run. If the plan begins with masks as
    they are (initial_mask="as_is"), those of the file come along, or its zeros; else all weights live at first."""
    sparsity: float = 0.0
    partition: PartitionConfig = field(default_factory=Contiguous)
    """How the model is cut into parts: contiguous(4), balanced(4), named([...]) or per_layer()."""
    allocation: str = "uniform"
    pattern: str = "unstructured"
    scope: str = "model"
    keep_dense: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    storage: Literal["masked", "compact"] = "masked"
    lr_scaling: float | Literal["auto"] = "auto"
    """Let learning rates follow density: a layer of density d trains at lr * d ** -lr_scaling, at most 10 * lr."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LRSchedule = field(default_factory=LRSchedule)
    """From each phase that restarts to the next that does; over the whole plan, if none does."""
    clip: float | None = None
    """The largest norm of the gradient; None for any."""
    accumulate: int = 1
    """Batches to an iteration."""
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    """On a GPU, compile the model, and replay forward and backward passes of batches of one shape as a CUDA graph."""
    graph: bool = False
    """On a GPU, the same without compiling: for small models, whose kernels are done before Python has started the
    next, and batches of more shapes than one wants to compile for. What a forward pass does in Python is done once: a
    number that it draws with `random`, say, stays the same."""
    evaluate_every: int = 1
    """Validate after each so many epochs, and after the last."""
    candidates: bool = True
    """Where a phase ends with an epoch that is validated, also evaluate what the model would be if it were pruned now.
    The best of all models at the target sparsity, by validation data, is kept."""
    seed: int = 0
    device: str = "auto"
    """"auto" for a GPU if there is one, or as torch names it: "cpu", "cuda", "cuda:1"."""
    replicas: int = 0
    """Under torchrun: how many processes share each batch. 0: one for each branch of a fork; all without forks."""
    shard: Literal["none", "fsdp"] = "none"
    """Under torchrun: "fsdp" shards the model over the processes that share each batch, by torch's FSDP2, so that each
    holds its share of the live weights and of the optimizer's state. Needs storage="compact"."""
    sync_batchnorm: bool = True
    """Whether BatchNorm sees the examples of all replicas, as in one process, or only its own, which is faster."""
    timeout_seconds: float = 600.0
    """Under torchrun: how long to wait for another process."""
    checkpoint_seconds: float = 60.0
    """The time between checkpoints; there is one after every branch of a fork too. No influence on results."""
    exploration: bool = True
    """Whether to keep count of the weights that ever lived, and of how much the masks change, for the report. Takes two
    bits a weight of the CPU's memory. No influence on results."""
    log: tuple[str, ...] = ()
    """What the run writes for people to look at: "csv", "tensorboard" (see growprune.logs). No influence on results."""
    claim: str = ""
    """What the recipe is expected to reach, and where."""

    def __post_init__(self) -> None:
        is_task = isinstance(self.task, Task) and is_dataclass(self.task)
        require(is_task, "task", self.task, "of a frozen dataclass derived from growprune.tasks.Task")
        check_choices(self)
        check_device(self.device)
        object.__setattr__(self, "lr_scaling", parse_lr_scaling(self.lr_scaling))  # results say the number
        check_counts(1, accumulate=self.accumulate, evaluate_every=self.evaluate_every)
        check_counts(0, replicas=self.replicas)
        require(self.clip is None or self.clip > 0, "clip", self.clip, "above 0, or None for no clipping")
        check_names(self.log)
        is_stored = self.shard == "none" or self.storage == "compact"
        require(is_stored, "storage", self.storage, "'compact' with shard='fsdp': of masked weights nothing is saved")
        self._check_options()

    def _check_options(self) -> None:
        known = own_options(self.method)
        for name, value in self.options.items():
            if name in SHARED:  # the plan would go by the option, and the model by the field
                raise GrowpruneError(f"options has {name}={value!r}: set the recipe's own field: {name}={value!r}")
            if name not in known:
                raise GrowpruneError(f"{self.method.__name__} has no option {name!r}; it takes {', '.join(known)}")
        if self.counts_iterations and {"epochs", "iterations"} <= self.options.keys():
            raise GrowpruneError(f"options has epochs and iterations of {self.method.__name__}: give one of the two")

    def is_recorded(self, device: torch.device) -> bool:
        """Whether forward and backward passes become CUDA graphs."""
        return (self.compile or self.graph) and device.type == "cuda"

    @property
    def counts_iterations(self) -> bool:
        """Whether the method counts in iterations: its plan's length in epochs depends on the data then."""
        return "iterations" in inspect.signature(self.method).parameters

    def plan(self, model: nn.Module, iterations_per_epoch: int = 0) -> Plan:
        """The recipe's plan for a model."""
        partition = self.partition.cut(model, keep_dense=self.keep_dense, include=self.include)
        return self.plan_over(partition, iterations_per_epoch)

    def plan_over(self, partition: Partition, iterations_per_epoch: int = 0) -> Plan:
        """The recipe's plan for any partition."""
        signature = inspect.signature(self.method)
        shared = {name: getattr(self, name) for name in SHARED if name in signature.parameters}
        options = dict(self.options)
        if self.counts_iterations and "epochs" in options and "epochs" not in signature.parameters:
            options["iterations"] = options.pop("epochs") * iterations_per_epoch
        try:
            signature.bind(partition, **shared, **options)
        except TypeError as error:
            instead = ", or epochs instead" if "iterations" in signature.parameters else ""
            raise GrowpruneError(f"{self.method.__name__}: {error}; give it with options{instead}") from error
        return self.method(partition, **shared, **options)

    def sparse_settings(self) -> dict[str, Any]:
        """What a SparseModel is told beside its model and its storage."""
        names = ("sparsity", "allocation", "pattern", "scope", "keep_dense", "include", "seed", "lr_scaling")
        return {name: getattr(self, name) for name in names}

    def shapes(self) -> nn.Module:
        """The task's model for its names and shapes; without weights, if it can be built so."""
        with torch.device("meta" if self.task.initialises_modules else "cpu"):
            return self.build_model()

    def build_model(self) -> nn.Module:
        model: object = self.task.build_model()
        if not isinstance(model, nn.Module):
            name, kind = type(self.task).__name__, type(model).__name__
            raise GrowpruneError(f"build_model of {name} returned {kind}, but must return a torch.nn.Module")
        return model

    def sparse_model(self, model: nn.Module) -> SparseModel:
        """A model as the recipe makes it sparse; all its weights are alive still."""
        return SparseModel(model, storage=self.storage, **self.sparse_settings())

    def extended(self, steps: int) -> Recipe:
        """The same recipe with a longer search."""
        check_counts(1, extend=steps)
        if not self.can_be_extended:
            raise GrowpruneError(f"method {self.method.__name__} has no steps to extend")
        return replace(self, options={**self.options, "steps": self.options["steps"] + steps})

    @property
    def can_be_extended(self) -> bool:
        """Whether its method has a search, of so many steps, that can be lengthened."""
        return "steps" in self.options


def own_options(method: Callable[..., Plan]) -> list[str]:
    """What a method takes beside the partition and what the recipe itself says; epochs stand for iterations."""
    names = [name for name in list(inspect.signature(method).parameters)[1:] if name not in SHARED]
    return [*names, "epochs"] if "iterations" in names and "epochs" not in names else names


def describe(value: Any) -> Any:
    """A recipe, or anything in one, as plain JSON values; functions by their names."""
    if is_dataclass(value) and not isinstance(value, type):
        named = {} if isinstance(value, Recipe | OptimizerConfig | LRSchedule) else {"name": type(value).__name__}
        return named | {f.name: describe(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): describe(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [describe(item) for item in value]
    return value.__name__ if callable(value) else plain(value)
