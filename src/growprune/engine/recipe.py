"""A recipe: all settings of a run in one frozen dataclass, with its optimizer and learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn, optim

from growprune.errors import GrowpruneError
from growprune.logs import check_names
from growprune.masks.layers import dense_shape
from growprune.masks.partition import PARTS, Partition, PartitionConfig, parse_parts
from growprune.plan import Plan, declaration_of
from growprune.plan.settings import check_counts, one_of, plain
from growprune.sparse.stepper import LR_RAMP
from growprune.tasks.task import Task
from growprune.training.settings import FirstMask, Resolved, Settings

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    kind.__name__.lower(): kind for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad)
}


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer of a recipe, and its settings."""

    kind: str = "sgd"
    """A name in `OPTIMIZERS`."""
    lr: float = 0.1
    """The peak of the learning-rate schedule."""
    weight_decay: float = 0.0
    """Applies to weights only, not to norms and biases."""
    momentum: float | None = None
    """For sgd and rmsprop."""
    nesterov: bool = False
    """For sgd."""
    betas: tuple[float, float] | None = None
    """For adam and adamw."""
    eps: float | None = None
    """For all but sgd."""

    def __post_init__(self) -> None:
        one_of("kind", self.kind, OPTIMIZERS)
        require(0 <= self.lr < math.inf, "lr", self.lr, ">= 0")
        require(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, ">= 0")
        require(self.momentum is None or 0 <= self.momentum < 1, "momentum", self.momentum, "in [0, 1)")
        require(all(0 <= beta < 1 for beta in self.betas or ()), "betas", self.betas, "in [0, 1) each")
        require(self.eps is None or 0 < self.eps < math.inf, "eps", self.eps, "> 0")

    @property
    def num_states(self) -> int:
        """Number of state values per weight."""
        return {"adam": 2, "adamw": 2, "rmsprop": 1, "adagrad": 1}.get(self.kind, 0) + bool(self.momentum)

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer of a model. Parameters with weight decay are in a group of their own."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        decaying = {
            id(parameter)
            for module in model.modules()
            for local, parameter in module.named_parameters(recurse=False)
            if len(dense_shape(module, local)) > 1  # for any storage
        }
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if id(p) in decaying], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if id(p) not in decaying], "weight_decay": 0.0},
        ]
        given = {
            "momentum": self.momentum,
            "nesterov": self.nesterov or None,
            "betas": self.betas,
            "eps": self.eps,
            "fused": (self.kind in ("sgd", "adam", "adamw") and any(p.is_cuda for p in parameters)) or None,
        }
        options = {name: value for name, value in given.items() if value is not None}
        try:
            return OPTIMIZERS[self.kind]([g for g in groups if g["params"]], lr=self.lr, **options)
        except (TypeError, ValueError) as error:
            raise GrowpruneError(f"optimizer {self.kind} does not accept {', '.join(options)}: {error}") from error


@dataclass(frozen=True)
class LRSchedule:
    """Learning-rate schedule from one restart of the plan to the next, as a factor of the peak."""

    shape: Literal["cosine", "step", "inverse_sqrt", "constant"] = "cosine"
    warmup_epochs: float = 0.0
    """Epochs of linear warm-up from (nearly) zero to the peak."""
    warmup_iterations: int = 0
    """Iterations of warm-up. Replaces warmup_epochs if not 0."""
    milestones: tuple[float, ...] = ()
    """step: fractions of the schedule after which the rate drops."""
    every_epochs: float = 0.0
    """step: epochs between drops. Replaces milestones if not 0."""
    gamma: float = 0.1
    """step: factor of each drop."""
    floor: float = 0.0
    """step: smallest factor."""

    def __post_init__(self) -> None:
        one_of("shape", self.shape, ("cosine", "step", "inverse_sqrt", "constant"))
        for name in ("warmup_epochs", "warmup_iterations", "every_epochs"):
            require(0 <= getattr(self, name) < math.inf, name, getattr(self, name), ">= 0")
        require(all(0 <= share <= 1 for share in self.milestones), "milestones", self.milestones, "in [0, 1] each")
        require(0 < self.gamma <= 1, "gamma", self.gamma, "in (0, 1]")
        require(0 <= self.floor <= 1, "floor", self.floor, "in [0, 1]")

    def factor(self, iteration: int, *, total: int, per_epoch: int) -> float:
        """The factor for an iteration (from 0) out of `total`, with `per_epoch` iterations per epoch."""
        warmup = self.warmup_iterations or round(self.warmup_epochs * per_epoch)
        # 1) linear warm-up; its first iteration already moves
        if iteration < warmup:
            return (iteration + 1) / warmup
        # 2) cosine from the peak to zero over what the warm-up leaves
        if self.shape == "cosine":
            return 0.5 * (1 + math.cos(math.pi * (iteration - warmup) / max(1, total - warmup)))
        # 3) steps down
        if self.shape == "step":
            drops = sum(iteration >= milestone * total for milestone in self.milestones)
            if self.every_epochs:
                drops = int(iteration / (self.every_epochs * per_epoch))
            return max(self.floor, self.gamma**drops)
        # 4) the inverse square root of the iteration, 1 where the warm-up ends
        if self.shape == "inverse_sqrt":
            return math.sqrt(max(1, warmup) / (iteration + 1))
        return 1.0


def require(holds: bool, name: str, value: object, must: str) -> None:
    if not holds:
        raise GrowpruneError(f"{name} must be {must}, got {value!r}")


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
    parts: PartitionConfig | int | str | None = None
    """The parts that grow in turn: balanced(4), contiguous(4), per_layer(), named([...]), or their number. Default:
    four parts of the kind that suits the method, or one per layer if there are fewer layers."""
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
    lr_ramp: float = LR_RAMP
    """The exponent rises from 0 to lr_scaling over this share of the plan."""
    cost_power: float = 0.0
    """Under allocation="global", rank the magnitudes of a layer times (operations per weight) ** -cost_power: more than
    0 keeps fewer weights in layers where each costs many operations, less than 0 keeps more."""
    rescale: bool | Literal["auto"] = "auto"
    """Multiply the weights that a random first mask keeps by 1 / sqrt(density of their layer). "auto": in models
    without normalization."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LRSchedule = field(default_factory=LRSchedule)
    """Runs from each restart to the next, or over the whole plan if there is none."""
    clip: float | None = None
    """Maximum gradient norm. None: no clipping."""
    accumulate: int = 1
    """Batches per iteration."""
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    """On a GPU, compile the forward and backward pass with torch.compile."""
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
    """Track which weights ever lived and how much the masks change, for the report. Needs three bits of CPU memory per
    weight. Does not change results."""
    log: tuple[str, ...] = ()
    """Log formats: "csv", "tensorboard" (growprune.logs). Does not change results."""
    claim: str = ""
    """The expected result, and on which hardware."""

    def __post_init__(self) -> None:
        is_task = isinstance(self.task, Task) and is_dataclass(self.task)
        require(is_task, "task", self.task, "a frozen dataclass derived from growprune.tasks.Task")
        one_of("storage", self.storage, ("masked", "compact"))
        one_of("precision", self.precision, ("fp32", "bf16"))
        one_of("shard", self.shard, ("none", "fsdp"))
        try:
            torch.device("cpu" if self.device == "auto" else self.device)
        except (RuntimeError, TypeError) as error:
            raise GrowpruneError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}") from error
        check_counts(1, accumulate=self.accumulate, evaluate_every=self.evaluate_every)
        check_counts(0, replicas=self.replicas)
        require(self.clip is None or self.clip > 0, "clip", self.clip, "> 0, or None for no clipping")
        if self.log:
            check_names(self.log)
        is_stored = self.shard == "none" or self.storage == "compact"
        require(is_stored, "storage", self.storage, "'compact' with shard='fsdp' (masked saves no memory)")
        known, about = own_options(self.method), declaration_of(self.method)
        for name, value in self.options.items():
            if name in ("sparsity", about.seed):  # the plan would go by the option, and the model by the field
                field = "sparsity" if name == "sparsity" else "seed"
                raise GrowpruneError(f"{name} is not an option. Set the recipe's own field: {field}={value!r}")
            if name not in known:
                raise GrowpruneError(
                    f"unknown option {name!r} of {self.method.__name__}. Options are: {', '.join(known)}"
                )
        if self.counts_iterations and {"epochs", "iterations"} <= self.options.keys():
            raise GrowpruneError(f"options of {self.method.__name__} has both epochs and iterations. Give one of them")
        self.chosen()  # checks the fields that `sparsify` takes too

    @cached_property
    def settings(self) -> Settings:
        """What the recipe says of sparsity, as `sparsify` takes it."""
        options, epochs = dict(self.options), None
        if "epochs" not in declaration_of(self.method).options:
            epochs = options.pop("epochs", None)
        names = ("sparsity", "parts", "pattern", "keep_dense", "include", "storage", "lr_scaling", "lr_ramp", "seed")
        said = {name: getattr(self, name) for name in (*names, "cost_power", "rescale")}
        said["example"] = self.task.example() if self.cost_power or self.keep_dense == "auto" else None
        return Settings(self.method, allocation=self.allocation or None, epochs=epochs, options=options, **said)

    @property
    def first_mask(self) -> FirstMask:
        """How the first mask is chosen: trained weights keep their largest, unless the options say otherwise."""
        about = declaration_of(self.method)
        usual = "magnitude" if self.weights else "random"
        return FirstMask(self.options.get(about.first_mask, usual) if about.first_mask else None)

    def resolve(self, model: nn.Module, iterations_per_epoch: int = 0) -> Resolved:
        """Make every choice that the recipe leaves open, for a model."""
        return self.settings.resolve(
            model, first=self.first_mask, iterations_per_epoch=iterations_per_epoch, is_recipe=True
        )

    def chosen(self) -> dict[str, Any]:
        """Return the fields that may be left open, with what they mean for this method and optimizer."""
        parts = PARTS if self.parts is None else self.parts
        if isinstance(parts, int | str):
            parts = parse_parts(parts, kind=declaration_of(self.method).partition)
        scaling: float | str = self.settings.scaling_from(self.first_mask)
        if scaling == "auto":
            scaling = 1.0 if self.optimizer.kind in ("adam", "adamw") else 0.0
        return {"parts": parts, "allocation": self.settings.resolved_allocation, "lr_scaling": scaling}

    @property
    def counts_iterations(self) -> bool:
        """True if the method takes iterations. The length of its plan in epochs then depends on the data."""
        return declaration_of(self.method).length == "iterations"

    def num_iterations_per_epoch(self) -> int:
        """Iterations per epoch. Looks at the data."""
        return math.ceil(self.task.num_batches() / self.accumulate)

    def plan(self, model: nn.Module, iterations_per_epoch: int = 0) -> Plan:
        """The recipe's plan for a model."""
        return self.resolve(model, iterations_per_epoch).plan

    def plan_over(self, partition: Partition, iterations_per_epoch: int = 0) -> Plan:
        """The recipe's plan for any partition."""
        how: dict[str, Any] = {"iterations_per_epoch": iterations_per_epoch, "is_recipe": True}
        return self.settings.plan_over(partition, self.first_mask, **how)[0]

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


def own_options(method: Callable[..., Plan]) -> list[str]:
    """Options of a method, without the partition and the fields of the recipe. epochs may replace iterations."""
    about = declaration_of(method)
    names = [name for name in about.options if name not in ("sparsity", about.seed)]
    return [*names, "epochs"] if about.length == "iterations" and "epochs" not in names else names


def describe(value: Any) -> Any:
    """Convert a recipe, or any value in it, to plain JSON values. Functions become their names.

    What a recipe leaves open is written as it is chosen, so that results contain it.
    """
    if isinstance(value, Recipe):
        chosen = value.chosen()
        return {f.name: describe(chosen.get(f.name, getattr(value, f.name))) for f in fields(value)}
    if is_dataclass(value) and not isinstance(value, type):
        named = {} if isinstance(value, OptimizerConfig | LRSchedule) else {"name": type(value).__name__}
        return named | {f.name: describe(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): describe(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [describe(item) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    return value.__name__ if callable(value) else plain(value)
