"""A recipe: all settings of a run, in one frozen dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import nn

from growprune.engine.device import check_device
from growprune.engine.optim import LRSchedule, OptimizerConfig, check_choices, require
from growprune.errors import GrowpruneError
from growprune.logs import check_names
from growprune.masks.heads import is_normalized, output_layers
from growprune.masks.partition import Partition
from growprune.masks.partition_kinds import PARTS, PartitionConfig, parse_parts
from growprune.plan import Plan
from growprune.plan.settings import check_counts, plain
from growprune.sparse.learning_rates import auto_exponent, parse_lr_scaling
from growprune.sparse.model import SparseModel
from growprune.tasks.task import Task

SHARED = ("sparsity", "seed")
"""Fields of a recipe that are passed to its method, if it accepts them."""


@dataclass(frozen=True)
class Recipe:
    """All settings of a run. Write a function that returns one; derive others with `dataclasses.replace`."""

    task: Task
    method: Callable[..., Plan]
    options: Mapping[str, Any]
    """Arguments of the method, such as steps, epochs and finetune. A method that takes `iterations` accepts `epochs`
    instead."""
    weights: str = ""
    """Initial weights: a safetensors file, sparse or dense, or a run folder. With initial_mask="as_is" the masks (or
    zeros) of the file are kept. Otherwise all weights are alive at first, and a method that starts sparse keeps the
    largest ones (initial_mask="magnitude") unless its options say otherwise."""
    sparsity: float = 0.0
    parts: PartitionConfig = None  # type: ignore[assignment]  # always set after __post_init__
    """The parts that grow in turn: balanced(4), contiguous(4), per_layer(), named([...]), or their number. Default:
    four parts of the kind that suits the method."""
    allocation: str = ""
    """How layers share the sparsity: "uniform", "global" or "erk". Default: the one that suits the method."""
    pattern: str = "unstructured"
    keep_dense: tuple[str, ...] | Literal["auto"] = "auto"
    """Names or globs of layers that are never pruned. "auto": output layers."""
    include: tuple[str, ...] = ()
    storage: Literal["masked", "compact"] = "masked"
    lr_scaling: float | Literal["auto"] = "auto"
    """Scale learning rates by density: a layer of density d trains at lr * d ** -lr_scaling, at most 10 * lr. "auto" is
    1 if the sparsity rises from a random mask under adam or adamw, else 0."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LRSchedule = field(default_factory=LRSchedule)
    """Runs from each restart to the next, or over the whole plan if there is none."""
    clip: float | None = None
    """Maximum gradient norm. None: no clipping."""
    accumulate: int = 1
    """Batches per iteration."""
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    """On a GPU, compile the model, and replay forward and backward passes of batches of one shape as a CUDA graph."""
    graph: bool = False
    """On a GPU, replay CUDA graphs without compiling: for small models, where starting kernels is the bottleneck, and
    for batches of many shapes. Python code of the forward pass runs only once: a number that it draws with `random`
    stays the same."""
    evaluate_every: int = 1
    """Epochs between validations. The last epoch is always validated."""
    candidates: bool = True
    """At the end of a phase, also evaluate the model pruned to the target sparsity. The best model at the target
    sparsity, by validation data, is kept."""
    seed: int = 0
    device: str = "auto"
    """"auto" (a GPU if there is one), "cpu", "cuda" or "cuda:1"."""
    replicas: int = 0
    """Under torchrun: number of processes that split each batch. 0: one per branch of a fork, or all without forks."""
    shard: Literal["none", "fsdp"] = "none"
    """Under torchrun: "fsdp" shards live weights and optimizer state with FSDP2 over the processes that split a batch.
    Needs storage="compact"."""
    sync_batchnorm: bool = True
    """True: BatchNorm uses the examples of all replicas, as in one process. False: only its own, which is faster."""
    timeout_seconds: float = 600.0
    """Under torchrun: seconds to wait for another process."""
    checkpoint_seconds: float = 60.0
    """Seconds between checkpoints. Each branch of a fork ends with one too. Does not change results."""
    exploration: bool = True
    """Track which weights ever lived and how much the masks change, for the report. Needs two bits of CPU memory per
    weight. Does not change results."""
    log: tuple[str, ...] = ()
    """Log formats: "csv", "tensorboard", "wandb" (growprune.logs). Does not change results."""
    claim: str = ""
    """The expected result, and on which hardware."""

    def __post_init__(self) -> None:
        is_task = isinstance(self.task, Task) and is_dataclass(self.task)
        require(is_task, "task", self.task, "a frozen dataclass derived from growprune.tasks.Task")
        check_choices(self)
        check_device(self.device)
        self._fill()
        check_counts(1, accumulate=self.accumulate, evaluate_every=self.evaluate_every)
        check_counts(0, replicas=self.replicas)
        require(self.clip is None or self.clip > 0, "clip", self.clip, "> 0, or None for no clipping")
        check_names(self.log)
        is_stored = self.shard == "none" or self.storage == "compact"
        require(is_stored, "storage", self.storage, "'compact' with shard='fsdp' (masked saves no memory)")
        self._check_options()

    def _fill(self) -> None:
        """Fill in the defaults of the method, so that results contain them."""
        meant = getattr(self.method, "allocation", "uniform"), getattr(self.method, "partition", "contiguous")
        object.__setattr__(self, "lr_scaling", self._resolved_scaling())
        object.__setattr__(self, "allocation", self.allocation or meant[0])
        parts: Any = PARTS if self.parts is None else self.parts
        if isinstance(parts, int | str):
            parts = parse_parts(parts, kind=meant[1])
        object.__setattr__(self, "parts", parts)

    def _resolved_scaling(self) -> float:
        given = parse_lr_scaling(self.lr_scaling)
        taken, mask = own_options(self.method), self.options.get("initial_mask", "random")
        is_rising = {"start", "initial_mask"} <= set(taken) and mask == "random" and not self.weights
        is_on = is_rising and self.optimizer.kind in ("adam", "adamw")
        return auto_exponent(is_adam_like=is_on) if given == "auto" else given

    def kept_dense(self, model: nn.Module) -> tuple[str, ...]:
        """Names of the layers of a model that are never pruned."""
        return output_layers(model)[0] if self.keep_dense == "auto" else self.keep_dense

    def _check_options(self) -> None:
        known = own_options(self.method)
        for name, value in self.options.items():
            if name in SHARED:  # the plan would go by the option, and the model by the field
                raise GrowpruneError(f"{name} is not an option. Set the recipe's own field: {name}={value!r}")
            if name not in known:
                raise GrowpruneError(
                    f"unknown option {name!r} of {self.method.__name__}. Options are: {', '.join(known)}"
                )
        if self.counts_iterations and {"epochs", "iterations"} <= self.options.keys():
            raise GrowpruneError(f"options of {self.method.__name__} has both epochs and iterations. Give one of them")

    def is_recorded(self, device: torch.device) -> bool:
        """True if forward and backward passes become CUDA graphs."""
        return (self.compile or self.graph) and device.type == "cuda"

    @property
    def counts_iterations(self) -> bool:
        """True if the method takes iterations. The length of its plan in epochs then depends on the data."""
        return "iterations" in inspect.signature(self.method).parameters

    def plan(self, model: nn.Module, iterations_per_epoch: int = 0) -> Plan:
        """The recipe's plan for a model."""
        return self.plan_over(self.cut(model), iterations_per_epoch)

    def cut(self, model: nn.Module) -> Partition:
        """Cut a model into the parts that grow in turn."""
        return self.parts.cut(model, keep_dense=self.kept_dense(model), include=self.include)

    def plan_over(self, partition: Partition, iterations_per_epoch: int = 0) -> Plan:
        """The recipe's plan for any partition."""
        signature = inspect.signature(self.method)
        shared = {name: getattr(self, name) for name in SHARED if name in signature.parameters}
        if "kappa" in signature.parameters and "kappa" not in self.options:
            shared["kappa"] = min(PARTS, len(partition))
        is_trained = self.weights and "initial_mask" in signature.parameters
        options = ({"initial_mask": "magnitude"} if is_trained else {}) | dict(self.options)
        if self.counts_iterations and "epochs" in options and "epochs" not in signature.parameters:
            options["iterations"] = options.pop("epochs") * iterations_per_epoch
        try:
            signature.bind(partition, **shared, **options)
        except TypeError as error:
            instead = ", or epochs instead" if "iterations" in signature.parameters else ""
            raise GrowpruneError(f"{self.method.__name__}: {error}. Give it in options{instead}") from error
        return self.method(partition, **shared, **options)

    def sparse_settings(self, model: nn.Module) -> dict[str, Any]:
        """The arguments of SparseModel, without model and storage."""
        names = ("allocation", "pattern", "include", "seed", "lr_scaling")
        is_pruned = "sparsity" in inspect.signature(self.method).parameters
        target = {"sparsity": self.sparsity if is_pruned else 0.0, "keep_dense": self.kept_dense(model)}
        target |= {"rescale": not is_normalized(model)}
        return target | {name: getattr(self, name) for name in names}

    def shapes(self) -> nn.Module:
        """Build the task's model for its names and shapes, on the meta device if possible."""
        with torch.device("meta" if self.task.initialises_modules else "cpu"):
            return self.build_model()

    def build_model(self) -> nn.Module:
        model: object = self.task.build_model()
        if not isinstance(model, nn.Module):
            name, kind = type(self.task).__name__, type(model).__name__
            raise GrowpruneError(f"build_model() of {name} must return a torch.nn.Module, got {kind}")
        return model

    def sparse_model(self, model: nn.Module) -> SparseModel:
        """Wrap a model in a SparseModel with the settings of the recipe. All weights are still alive."""
        return SparseModel(model, storage=self.storage, **self.sparse_settings(model))


def own_options(method: Callable[..., Plan]) -> list[str]:
    """Options of a method, without the partition and the fields of the recipe. epochs may replace iterations."""
    names = [name for name in list(inspect.signature(method).parameters)[1:] if name not in SHARED]
    return [*names, "epochs"] if "iterations" in names and "epochs" not in names else names


def describe(value: Any) -> Any:
    """Convert a recipe, or any value in it, to plain JSON values. Functions become their names."""
    if is_dataclass(value) and not isinstance(value, type):
        named = {} if isinstance(value, Recipe | OptimizerConfig | LRSchedule) else {"name": type(value).__name__}
        return named | {f.name: describe(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): describe(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [describe(item) for item in value]
    return value.__name__ if callable(value) else plain(value)
