"""What a user says of a sparse training, and what it means for a model.

`Settings` are the arguments of `sparsify`, of both callbacks and of a recipe: checked, and "auto" where the user left a
choice open. `Settings.resolve` makes every choice, once a model is there. It returns a `Resolved`, or raises before
anything is changed.
"""

from __future__ import annotations

import difflib
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from growprune.errors import GrowpruneError, warn
from growprune.masks.allocation import ALLOCATIONS, parse_cost_power
from growprune.masks.inspection import already_sparse, output_layers, signs_of_training
from growprune.masks.layers import Layers, Weight, few, frozen_layers, is_normalized, layer_weights, prunable_weights
from growprune.masks.partition import PARTS, Partition, PartitionConfig, parse_parts
from growprune.masks.patterns import NofM, parse_pattern
from growprune.methods import find_method
from growprune.plan import (
    Action,
    By,
    Declaration,
    InitialMask,
    Part,
    Plan,
    declaration_of,
    fill_lengths,
    plan_length,
    walk,
)
from growprune.plan.settings import (
    as_names,
    as_seed,
    check_counts,
    check_share,
    check_sparsity,
    one_of,
    parse_lr_scaling,
)
from growprune.sparse.cursor import Cursor
from growprune.sparse.model import SparseModel, check_model
from growprune.sparse.stepper import LR_RAMP, check_rates, unwrapped
from growprune.storage import STORAGES

PartsLike: TypeAlias = int | str | Partition | PartitionConfig | Sequence[Sequence[str]] | None
"""A number of parts, a kind such as "balanced", "balanced(8)" or `growprune.balanced(8)`, a list of lists of names, or
a `Partition`. None for four parts, or one per layer if there are fewer layers."""

Scorer: TypeAlias = Callable[[SparseModel, By], None]
"""Computes gradients for a first edit that needs them, by calling `sparse.score`."""

OTHER_WORDS = {"kappa": "parts", "partition": "parts", "steps": "iterations", "max_steps": "iterations"}
"""Words for arguments in the paper and in other libraries."""
LARGE_MODEL = 1_000_000
"""The least number of prunable weights at which it is worth a warning that many are live at a time."""


BY_DATA = ("wanda", "sparsegpt")
"""First masks that need calibration data: `prune_pretrained` makes them, and the plan keeps them."""
MASKS: tuple[str, ...] = (*get_args(InitialMask), *BY_DATA)


@dataclass(frozen=True)
class FirstMask:
    """How the first mask is chosen."""

    initial_mask: str | None
    """None if the method chooses it itself."""
    found: float | None = None
    """The sparsity of a model that is already sparse."""


@dataclass(frozen=True)
class Settings:
    """The arguments of `sparsify`, checked. Its docstring explains them."""

    method: str | Callable[..., Plan]
    sparsity: float
    iterations: int | None = None
    epochs: int | None = None
    iterations_per_epoch: int | None = None
    parts: PartsLike = None
    allocation: str | None = None
    pattern: str = "unstructured"
    keep_dense: str | Sequence[str] = "auto"
    include: Sequence[str] = ()
    storage: str = "masked"
    initial_mask: str = "auto"
    calibration: Iterable[Any] | None = None
    lr_scaling: float | Literal["auto"] = "auto"
    lr_ramp: float = LR_RAMP
    seed: int = 0
    cost_power: float = 0.0
    rescale: bool | Literal["auto"] = "auto"
    example: Any = field(default=None, compare=False)
    options: Mapping[str, Any] = field(default_factory=dict)
    """The method's own options."""

    @classmethod
    def among(cls, given: Mapping[str, Any]) -> Settings:
        """Select the settings from the `locals()` of a function that takes all of them, and perhaps others."""
        return cls(**{name: given[name] for name in cls.__dataclass_fields__})

    def __post_init__(self) -> None:
        check_sparsity(self.sparsity)
        counts = {name: getattr(self, name) for name in ("iterations", "epochs", "iterations_per_epoch")}
        check_counts(1, **{name: count for name, count in counts.items() if count is not None})
        one_of("storage", self.storage, STORAGES)
        one_of("allocation", self.resolved_allocation, ALLOCATIONS)
        if self.pattern != "unstructured":
            parse_pattern(self.pattern)
        plain: dict[str, Any] = {"lr_scaling": parse_lr_scaling(self.lr_scaling), "seed": as_seed(self.seed)}
        if self.cost_power != 0:
            plain["cost_power"] = parse_cost_power(self.cost_power, self.resolved_allocation)
        check_share(lr_ramp=self.lr_ramp)
        plain["include"] = as_names(self.include, "include")
        if self.keep_dense != "auto":
            plain["keep_dense"] = as_names(self.keep_dense, "keep_dense")
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        if self.rescale not in ("auto", True, False):
            raise GrowpruneError(f"rescale must be 'auto', True or False, got {self.rescale!r}")
        one_of("initial_mask", self.initial_mask, ("auto", *MASKS))
        if self.initial_mask != "auto" and self.declaration.first_mask is None:
            is_undeclared = "initial_mask" in self.declaration.options
            hint = " (or declare it: @method(first_mask='initial_mask'))" if is_undeclared else ""
            raise GrowpruneError(
                f"{self.name} chooses its first mask itself: remove initial_mask={self.initial_mask!r}{hint}"
            )
        if self.initial_mask in BY_DATA and self.calibration is None:
            raise GrowpruneError(f"initial_mask={self.initial_mask!r} needs calibration=[...], a few batches of inputs")
        if self.calibration is not None and self.initial_mask not in BY_DATA:
            raise GrowpruneError(
                f"calibration is only used by initial_mask='wanda' or 'sparsegpt', got {self.initial_mask!r}"
            )
        taken = [name for name in self.declaration.options if name not in Settings.__dataclass_fields__]
        for name in self.options:
            if name not in self.declaration.options:
                close = [OTHER_WORDS[name]] if name in OTHER_WORDS else []
                close += difflib.get_close_matches(name, [*taken, *Settings.__dataclass_fields__], 1)
                hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(taken) or 'none'}"
                raise GrowpruneError(f"{self.name} takes no option {name!r}: {hint}")

    @functools.cached_property
    def make_plan(self) -> Callable[..., Plan]:
        return self.method if callable(self.method) else find_method(self.method)

    @functools.cached_property
    def declaration(self) -> Declaration:
        """What the method declares."""
        return declaration_of(self.make_plan)

    @property
    def name(self) -> str:
        """The method's name, for messages."""
        return str(getattr(self.method, "__name__", self.method))

    @functools.cached_property
    def resolved_allocation(self) -> str:
        """The allocation that the user chose, or else the method's own."""
        return self.allocation or self.declaration.allocation

    def to_save(self) -> dict[str, Any]:
        """Return the settings that must be the same when a checkpoint is resumed, as plain values."""
        names = ("sparsity", "pattern", "seed", "storage", "lr_scaling", "lr_ramp", "cost_power", "rescale")
        chosen = {"method": self.name, "allocation": self.resolved_allocation}
        return chosen | {name: getattr(self, name) for name in names}

    def with_settings_of(self, sparse: SparseModel) -> Settings:
        """Return the same with the settings of a SparseModel, whose mask is the first one."""
        names = ("allocation", "keep_dense", "include", "seed", "storage", "lr_ramp", "cost_power", "lr_scaling")
        its = {name: getattr(sparse, name) for name in names}
        its |= {"pattern": sparse.pattern.name, "initial_mask": "as_is"}
        for name, value in its.items():
            given = getattr(self, name)
            if given not in (value, Settings.__dataclass_fields__[name].default):
                raise GrowpruneError(
                    f"sparsify got {name}={given!r}, but the SparseModel has {name}={value!r}: set it only there"
                )
        if self.declaration.first_mask is None:
            raise GrowpruneError(f"{self.name} cannot start from a SparseModel: use cyclic_gap, gradual_gap or rigl")
        return replace(self, **its)

    def kept_dense(
        self, model: nn.Module, example: Any = None, *, layers: Layers | None = None
    ) -> tuple[tuple[str, ...], tuple[str, ...], str]:
        """Return the names or globs that are never pruned, the frozen layers among them, and how others were found."""
        named, how = tuple(self.keep_dense), "keep_dense"
        if self.keep_dense == "auto":
            named, how = output_layers(model, self.example if example is None else example, layers=layers)
        frozen = frozen_layers(model, include=self.include, layers=layers)
        return tuple(dict.fromkeys((*named, *frozen))), frozen, how

    def cut(
        self, model: nn.Module, keep_dense: Sequence[str], num_layers: int | None = None, layers: Layers | None = None
    ) -> Partition:
        """Divide a model into the parts that grow in turn.

        Args:
            keep_dense: as `kept_dense` returns it.
            num_layers: how many layers may be pruned, if known.
            layers: what `layer_weights` returns, if it is known.
        """
        parts = self.parts
        names: dict[str, Any] = {"keep_dense": keep_dense, "include": self.include, "layers": layers}
        if isinstance(parts, Partition):
            return parts.counted(model, **names)
        if parts is None or isinstance(parts, int | str):
            most = _num_layers(prunable_weights(model, **names)) if num_layers is None else num_layers
            number = min(PARTS, most) if parts is None else parts
            parts = parse_parts(number, kind=self.declaration.partition, most=most)
        return parts.cut(model, **names) if isinstance(parts, PartitionConfig) else Partition.of(model, parts, **names)

    def plan_over(
        self,
        parts: Partition,
        first: FirstMask,
        *,
        iterations: int | None = None,
        iterations_per_epoch: int | None = None,
        is_recipe: bool = False,
    ) -> tuple[Plan, int | None]:
        """Return the plan for a partition, and the iterations of its epochs.

        Lengths that the user left out are filled in so that the plan takes the whole training, but not in a recipe. If
        the user gave none in epochs, a method whose phases have epochs gets epochs of one iteration.
        """
        about, given = self.declaration, dict(self.options)
        unit = iterations_per_epoch if self.iterations_per_epoch is None else self.iterations_per_epoch
        total = self.iterations or iterations
        if self.epochs is not None and "epochs" in about.options:
            given["epochs"] = self.epochs
        elif self.epochs is not None and self.iterations is None:
            if unit is None:
                raise GrowpruneError(f"epochs={self.epochs} also needs iterations_per_epoch=len(loader)")
            total = self.epochs * unit
        if about.length not in (None, "iterations") and total is not None and not is_recipe:
            unit = unit if {"epochs", "finetune"} & given.keys() else 1

        # what is filled in, unless the user gave it
        options: dict[str, Any] = {"sparsity": self.sparsity} if "sparsity" in about.options else {}
        if about.seed:
            options[about.seed] = self.seed
        if about.parts:
            options[about.parts] = self.parts if isinstance(self.parts, int) else min(PARTS, len(parts))
        if about.first_mask and first.initial_mask:
            options[about.first_mask] = first.initial_mask
        if self.is_start_open and first.found is not None:
            options[str(about.rises_from)] = min(first.found, self.sparsity)
        options |= given
        if total is not None and is_recipe and about.length == "iterations":
            options["iterations"] = total
        elif total is not None and not is_recipe:
            whole = total if about.length == "iterations" else total // (unit or 1)
            options = fill_lengths(self.make_plan, options, whole, parts=len(parts)) | options
        missing = [p.name for p in about.options.values() if p.default is p.empty and p.name not in options]
        if missing and total is None and not is_recipe and about.length is not None:
            raise GrowpruneError(
                f"{self.name} needs the length of the training: pass iterations=epochs * len(loader), the number of "
                f"optimizer steps"
            )
        if missing:
            instead = ", or epochs instead" if "iterations" in missing else ""
            raise GrowpruneError(f"{self.name} needs {', '.join(missing)}. Give it in options{instead}")
        plan = self.make_plan(parts, **options)
        if self.is_start_open and self.pattern != "unstructured":
            pattern = parse_pattern(self.pattern)
            least = 1 - pattern.n / pattern.m if isinstance(pattern, NofM) else 0.0
            if 0 < _first_sparsity(plan) < least <= self.sparsity:  # which this pattern cannot have
                plan = self.make_plan(parts, **options | {str(about.rises_from): least})
        if unit is None and any([s.phase.epochs for s in walk(plan)]):
            raise GrowpruneError(f"{self.name} with epochs also needs iterations_per_epoch=len(loader)")
        return plan, unit

    @functools.cached_property
    def is_start_open(self) -> bool:
        """True if the sparsity rises, from a start that the user did not set."""
        about = self.declaration
        return about.rises_from is not None and not {about.rises_from, about.peak} & self.options.keys()

    def scaling_from(self, first: FirstMask) -> float | Literal["auto"]:
        """Return lr_scaling: 0 if "auto" does not apply, because the sparsity does not rise from a random mask."""
        rises = self.declaration.rises_from is not None and first.initial_mask == "random"
        return 0.0 if self.lr_scaling == "auto" and not rises else self.lr_scaling

    def resolve(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        sparse: SparseModel | None = None,
        first: FirstMask | None = None,
        iterations: int | None = None,
        iterations_per_epoch: int | None = None,
        remedy: Callable[[int], str] = "iterations={}".format,
        is_recipe: bool = False,
    ) -> Resolved:
        """Make every choice that is left open, and check all of them. Only a first mask by data changes the model.

        Args:
            optimizers: those of the model, if they exist by now.
            sparse: the SparseModel of the model, if there is one already. Its mask is the first one.
            first: how the first mask is chosen, if that is known, as when a training is resumed.
            iterations: the total optimizer steps of a trainer, if a trainer owns the loop.
            iterations_per_epoch: its optimizer steps in an epoch, if known.
            remedy: returns the setting for a training of a given number of steps, for an error.
            is_recipe: True for a recipe, which says all lengths itself, and whose plan may have branches.
        """
        if sparse is None:
            check_model(model, storage=self.storage)
        said = self if sparse is None else self.with_settings_of(sparse)
        about, allocation = said.declaration, said.resolved_allocation

        # which weights, in which parts
        example = None
        if said.example is None and isinstance(said.calibration, Sequence) and said.calibration:
            example = said.calibration[0]
        layers = layer_weights(model)
        if sparse is None:
            keep_dense, frozen, how_kept = said.kept_dense(model, example, layers=layers)
        else:
            keep_dense, how_kept = sparse.keep_dense, "keep_dense of the SparseModel"
            frozen = frozen_layers(model, include=said.include, layers=layers)
        weights = prunable_weights(model, keep_dense=keep_dense, include=said.include, layers=layers)
        _check_trained(model, weights, optimizers)
        parts = said.cut(model, keep_dense, _num_layers(weights), layers=layers)

        # the first mask
        is_by_data = first is None and sparse is None and said.initial_mask in BY_DATA
        if about.first_mask is None:
            first = FirstMask(None)
        elif sparse is not None:
            first = FirstMask("as_is", sparse.sparsity)
        elif is_by_data:
            first = FirstMask("magnitude")  # for the plan's first sparsity, to which data then prune
        elif first is None and said.initial_mask == "auto":
            first = said._auto_mask(model, weights, optimizers)
        elif first is None:
            first = FirstMask(
                said.initial_mask, None if said.initial_mask == "random" else already_sparse(model, weights)
            )

        # the plan
        lengths: dict[str, Any] = {"iterations": iterations, "iterations_per_epoch": iterations_per_epoch}
        plan, unit = said.plan_over(parts, first, **lengths, is_recipe=is_recipe)
        targets = [edit.to for scheduled in walk(plan) for edit in scheduled.phase.edits if edit.to]
        for weight in weights:
            parse_pattern(said.pattern).check(weight, min(targets, default=0.0))
        if not is_recipe:
            if any([scheduled.branch is not None for scheduled in walk(plan)]):
                raise GrowpruneError(
                    f"{said.name} trains branches on several machines, which a single loop cannot do: use cyclic_gap "
                    f"or gradual_gap, or `growprune train`"
                )
            length, total = plan_length(plan, unit or 0), iterations or said.iterations
            if total is None and said.epochs is not None and "epochs" not in about.options:
                total = said.epochs * (unit or 0)
            if total is not None and length != total:
                names = ("iterations", "steps", "epochs", "finetune")
                given = [f"{name}={plan.options[name]}" for name in names if name in plan.options]
                raise GrowpruneError(
                    f"the plan of {said.name} has {length} optimizer steps ({', '.join(given)}), but the training has "
                    f"{total}: set {remedy(length)}, or use options of {said.name} that add up to {total}"
                )
            said._warn_of_peak(plan, weights)

        scaling = said.scaling_from(FirstMask("as_is") if is_by_data else first)
        resolved = Resolved(
            settings=said,
            partition=parts,
            plan=plan,
            iterations_per_epoch=unit,
            weights=weights,
            keep_dense=keep_dense,
            frozen=frozen,
            how_kept=how_kept,
            layers=layers,
            allocation=allocation,
            sparsity=said.sparsity if "sparsity" in about.options else 0.0,
            lr_scaling=scaling,
            rescale=not is_normalized(model) if said.rescale == "auto" else said.rescale,
            first=first,
        )

        # a first mask by data, which changes weights: last, when nothing can be refused any more
        if is_by_data:
            for optimizer in optimizers:
                check_rates(scaling, unwrapped(optimizer))
            from growprune.sparse.pretrained_pruning import prune_pretrained  # which few trainings need

            pruned = prune_pretrained(
                model,
                said.calibration,
                sparsity=_first_sparsity(plan),
                by=said.initial_mask,
                pattern=said.pattern,
                # a layer is pruned by itself, so no ranking can be global; equal sparsity would ruin small layers
                allocation="uniform" if allocation == "uniform" else "erk",
                keep_dense=keep_dense,
                include=said.include,
            )
            pruned.to_dense_()
            resolved = resolved.starting_from(FirstMask("as_is", pruned.sparsity), **lengths)
        return resolved

    def _auto_mask(
        self, model: nn.Module, weights: Sequence[Weight], optimizers: Sequence[torch.optim.Optimizer]
    ) -> FirstMask:
        """Choose the first mask by inspecting the model. Warn about the choice if it is not a random mask."""
        zeros = already_sparse(model, weights)
        if zeros is not None:
            is_possible = zeros <= self.sparsity if self.is_start_open else zeros == self.sparsity
            # zeros of a model are counted over all layers, so other allocations may not fit them
            is_kept = is_possible and self.resolved_allocation.startswith("global")
            first = FirstMask("as_is" if is_kept else "magnitude", zeros)
            fate = " and stay pruned" if is_kept else "; the largest are kept"
            found = f"{zeros:.4g} of the model's weights are already zero{fate}"
        elif reason := (
            "its optimizer has state"
            if any(unwrapped(optimizer).state for optimizer in optimizers)
            else signs_of_training(model, weights)
        ):
            first = FirstMask("magnitude")
            found = f"the model is already trained ({reason}), so its largest weights are kept"
        else:
            return FirstMask("random")
        warn(
            f"{found}. Pass initial_mask={first.initial_mask!r} to silence this warning, or initial_mask='random' to "
            f"start with a random mask"
        )
        return first

    def _warn_of_peak(self, plan: Plan, weights: Sequence[Weight]) -> None:
        """Warn if one layer has most of a large model, so that the default limit of live weights cannot be kept."""
        total, share = sum(weight.numel for weight in weights), plan.partition.largest_share
        if not self.is_start_open or share <= 0.5 or total < LARGE_MODEL:
            return
        limits = [edit.within or 0 for scheduled in walk(plan) for edit in scheduled.phase.edits]
        peak = math.ceil(max(limits, default=0) * 1e4) / 1e4
        if not peak:
            return
        largest = max(weights, key=lambda weight: weight.numel)
        warn(
            f"up to {peak:.0%} of the prunable weights will be live at a time, because one part has {share:.0%} of "
            f"them and grows as a whole; its largest layer is {largest.name}, with {largest.numel / total:.0%}. Pass "
            f"{self.declaration.peak}={peak:g} to accept this, or use more parts= if the part has several layers, "
            f"keep_dense=[...], or method='rigl'"
        )


@dataclass(frozen=True)
class Resolved:
    """What settings mean for a model: every choice is made. Only a first mask by data has changed weights."""

    settings: Settings
    partition: Partition
    plan: Plan
    iterations_per_epoch: int | None
    weights: tuple[Weight, ...]
    """The weights that are pruned."""
    keep_dense: tuple[str, ...]
    frozen: tuple[str, ...]
    """Weights that are frozen, and so stay as they are."""
    how_kept: str
    """How the other layers that stay dense were found."""
    layers: Layers
    """All layers of the model."""
    allocation: str
    sparsity: float
    """The sparsity of the SparseModel: 0 for a method that prunes nothing."""
    lr_scaling: float | Literal["auto"]
    """0 if "auto" does not apply to this training; "auto" if the optimizer decides."""
    rescale: bool
    first: FirstMask

    @functools.cached_property
    def num_iterations(self) -> int:
        """The optimizer steps of the plan."""
        return plan_length(self.plan, self.iterations_per_epoch or 0)

    @property
    def peak_density(self) -> float:
        """An estimate of the largest share of the prunable weights that are live at a time."""
        parts = self.partition
        sizes = parts.sizes or (1,) * len(parts)
        density, peak, total = [1.0] * len(parts), 0.0, max(1, sum(sizes))
        covered: dict[Part, list[int]] = {}
        for scheduled in walk(self.plan):
            before = list(density)
            for edit in scheduled.phase.edits:
                if edit.part not in covered:
                    tensors = set(edit.part.tensors)
                    covered[edit.part] = [i for i, part in enumerate(parts) if tensors.intersection(part.tensors)]
                for i in covered[edit.part]:
                    if edit.to is None:
                        factor = 1 - (edit.share or 0) if edit.action is Action.PRUNE else 1 + (edit.share or 0)
                        density[i] = min(1.0, density[i] * factor)
                    else:
                        bound = min if edit.action is Action.PRUNE else max
                        density[i] = bound(density[i], 1 - edit.to)
                    excess = sum(map(operator.mul, density, sizes)) - (edit.within or 1) * total
                    density[i] -= max(0.0, excess) / sizes[i] if edit.within is not None else 0.0
            if scheduled.phase.is_trained:
                peak = max(peak, sum(map(operator.mul, density, sizes)) / total)
            if scheduled.branch is not None:
                density = before
        return peak

    def starting_from(
        self, first: FirstMask, *, iterations: int | None = None, iterations_per_epoch: int | None = None
    ) -> Resolved:
        """Return the same with another first mask."""
        said = self.settings
        plan, unit = said.plan_over(
            self.partition, first, iterations=iterations, iterations_per_epoch=iterations_per_epoch
        )
        scaling = said.scaling_from(first)
        return replace(self, first=first, plan=plan, iterations_per_epoch=unit, lr_scaling=scaling)

    def sparse_settings(self) -> dict[str, Any]:
        """Return the arguments of SparseModel, without model and storage."""
        mine = {name: getattr(self, name) for name in ("sparsity", "allocation", "keep_dense", "lr_scaling", "rescale")}
        return mine | {
            name: getattr(self.settings, name)
            for name in ("pattern", "include", "seed", "lr_ramp", "cost_power", "example")
        }

    def make_sparse(self, model: nn.Module) -> SparseModel:
        """Create the SparseModel. All weights are still live."""
        return SparseModel(model, storage=self.settings.storage, weights=self.weights, **self.sparse_settings())

    def cursor(self, model: nn.Module, sparse: SparseModel | None, score: Scorer | None) -> Cursor:
        """Create the SparseModel, if there is none, and a cursor at the start of the plan."""
        made = self.make_sparse(model) if sparse is None else sparse
        before = made.target_sparsity, made.lr_scaling
        made.aim(self.sparsity, self.lr_scaling)
        try:
            cursor = self.new_cursor(made, score)
        except GrowpruneError:
            made.aim(*before)
            if sparse is None and made.ranks is None:
                made.to_dense_()  # a plain model, which can be given again
            raise
        made.train_replicas()
        return cursor

    def new_cursor(self, sparse: SparseModel, score: Scorer | None) -> Cursor:
        """Create a cursor at the start of the plan."""
        look = None if score is None else functools.partial(score, sparse)
        return Cursor(sparse, self.plan, iterations_per_epoch=self.iterations_per_epoch, score=look)


def describe(resolved: Resolved, model: nn.Module) -> str:
    """Describe in one line what is pruned, what stays dense and why, and how long the plan is.

    >>> model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 2))
    >>> print(describe(Settings("rigl", 0.75, iterations=10).resolve(model), model))
    rigl to sparsity 0.75 in 10 iterations || prunes 1 layer, 128 weights of 282 parameters || peak density 0.25 || \
dense: 3 (the layer registered last), 0 (Embedding), 50 parameters of norms and biases
    """
    said, parameters = resolved.settings, dict(model.named_parameters())
    pruned = {weight.parameter for weight in resolved.weights}
    weights = sum([weight.numel for weight in resolved.weights])
    frozen = resolved.frozen
    layers = {w.parameter: path for path, several in resolved.layers.items() for w in several}
    kept = dict.fromkeys(path for name, path in layers.items() if name not in pruned and name not in frozen)
    dense = [f"{few(kept)} ({resolved.how_kept})"] if kept else []
    dense += [f"{few(frozen)} (frozen)"] if frozen else []
    others = {name: parameter for name, parameter in parameters.items() if name not in pruned | layers.keys()}
    modules = dict.fromkeys(name.rpartition(".")[0] for name, parameter in others.items() if parameter.ndim > 1)
    dense += [f"{path} ({type(model.get_submodule(path)).__name__})" for path in list(modules)[:5]]
    small = sum([parameter.numel() for parameter in others.values() if parameter.ndim < 2])
    dense += [f"{small:,} parameters of norms and biases"] if small else []
    total = weights + sum([parameter.numel() for name, parameter in parameters.items() if name not in pruned])
    count = _num_layers(resolved.weights)
    facts = (
        f"{said.name} to sparsity {resolved.sparsity:g} in {resolved.num_iterations:,} iterations",
        f"prunes {count} layer{'' if count == 1 else 's'}, {weights:,} weights of {total:,} parameters",
        f"peak density {resolved.peak_density:.2g}",
        f"dense: {', '.join(dense) or 'none'}",
    )
    return " || ".join(facts)


def _num_layers(weights: Iterable[Weight]) -> int:
    return len({weight.parameter.rpartition(".")[0] for weight in weights})


def _first_sparsity(plan: Plan) -> float:
    """Return the sparsity of a plan's first edit; 0 if it has none."""
    return next((edit.to or 0.0 for s in walk(plan) for edit in s.phase.edits[:1]), 0.0)


def _check_trained(model: nn.Module, weights: Sequence[Weight], optimizers: Sequence[Any]) -> None:
    """Raise if the optimizers train none of the parameters that are pruned. Warn if they train only some."""
    trained = {id(p) for o in optimizers for group in unwrapped(o).param_groups for p in group["params"]}
    parameters = dict(model.named_parameters())
    wanted = [w.parameter for w in weights if parameters[w.parameter].requires_grad]  # not those below adapters
    left_out = [name for name in wanted if id(parameters[name]) not in trained]
    if not optimizers or not left_out:
        return
    if left_out == wanted:
        raise GrowpruneError(
            f"the optimizer trains none of the weights to prune ({wanted[0]}, ...): create it with model.parameters()"
        )
    warn(
        f"the optimizer does not train {left_out[0]} ({len(left_out)} of {len(wanted)} weights to prune): pass all "
        f"optimizers as a list, or freeze such weights with requires_grad_(False)"
    )
