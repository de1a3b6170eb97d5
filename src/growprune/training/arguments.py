"""The arguments of a sparse training, shared by `sparsify` and the callbacks of trainers."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from growprune.errors import GrowpruneError, warn
from growprune.masks.heads import is_normalized, output_layers
from growprune.masks.layers import Weight, frozen_layers, prunable_weights
from growprune.masks.partition import Partition
from growprune.masks.partition_kinds import PARTS
from growprune.methods import find_method
from growprune.plan import By, Plan, walk
from growprune.plan.lengths import fill_lengths, plan_length
from growprune.plan.settings import as_names, check_counts, check_sparsity
from growprune.sparse.cursor import Cursor
from growprune.sparse.internals import internals
from growprune.sparse.learning_rates import parse_lr_scaling
from growprune.sparse.model import SparseModel
from growprune.sparse.pretrained_pruning import prune_pretrained
from growprune.storage import parse_storage
from growprune.training.cutting import PartsLike, cut
from growprune.training.first_mask import BY_DATA, MASKS, FirstMask, choose_mask, is_rising
from growprune.training.processes import share_gradients

OTHER_WORDS = {"kappa": "parts", "partition": "parts", "steps": "iterations", "max_steps": "iterations"}
"""Words for arguments in the paper and in other libraries."""
LARGE_MODEL = 1_000_000
"""The least number of prunable weights at which it is worth a warning that many are live at a time."""
ANY_LENGTH = 1000
"""The length of a plan that is created only for its first edit."""


@contextmanager
def given_back(made: SparseModel | None) -> Iterator[None]:
    """If what follows is refused, turn a SparseModel made for it into a plain model, which can be given again."""
    try:
        yield
    except GrowpruneError:
        if made is not None and internals(made).ranks is None:
            made.to_dense_()
        raise


@dataclass(frozen=True)
class Arguments:
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
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    """The method's own options."""

    @classmethod
    def among(cls, given: Mapping[str, Any]) -> Arguments:
        """Select the arguments from the `locals()` of a function that takes all of them, and perhaps others."""
        return cls(**{name: given[name] for name in cls.__dataclass_fields__})

    def __post_init__(self) -> None:
        check_sparsity(self.sparsity)
        counts = {name: getattr(self, name) for name in ("iterations", "epochs", "iterations_per_epoch")}
        check_counts(1, **{name: count for name, count in counts.items() if count is not None})
        parse_storage(self.storage)
        parse_lr_scaling(self.lr_scaling)
        if self.keep_dense != "auto":
            as_names(self.keep_dense, "keep_dense")
        self._check_mask()
        taken = [name for name in self._parameters if name not in Arguments.__dataclass_fields__ and name != "kappa"]
        for name in self.options:
            if name not in taken:
                close = [OTHER_WORDS[name]] if name in OTHER_WORDS else []
                close += difflib.get_close_matches(name, [*taken, *Arguments.__dataclass_fields__], 1)
                hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(taken) or 'none'}"
                raise GrowpruneError(f"{self.name} takes no option {name!r}: {hint}")

    def _check_mask(self) -> None:
        if self.initial_mask not in ("auto", *MASKS):
            known = ", ".join(map(repr, ("auto", *MASKS)))
            raise GrowpruneError(f"initial_mask must be one of {known}, got {self.initial_mask!r}")
        if self.initial_mask != "auto" and not self._takes_mask:
            raise GrowpruneError(
                f"{self.name} chooses its first mask itself: remove initial_mask={self.initial_mask!r}"
            )
        if self.initial_mask in BY_DATA and self.calibration is None:
            raise GrowpruneError(f"initial_mask={self.initial_mask!r} needs calibration=[...], a few batches of inputs")
        if self.calibration is not None and self.initial_mask not in BY_DATA:
            raise GrowpruneError(
                f"calibration is only used by initial_mask='wanda' or 'sparsegpt', got {self.initial_mask!r}"
            )

    @property
    def make_plan(self) -> Callable[..., Plan]:
        return self.method if callable(self.method) else find_method(self.method)

    @property
    def _parameters(self) -> list[str]:
        """The method's parameters, without the partition."""
        return list(inspect.signature(self.make_plan).parameters)[1:]

    @property
    def _takes_mask(self) -> bool:
        return "initial_mask" in self._parameters

    @property
    def _own_options(self) -> dict[str, Any]:
        """The method's options, with `epochs` if the method counts in them."""
        is_own = self.epochs is not None and "epochs" in self._parameters
        return {**self.options, "epochs": self.epochs} if is_own else dict(self.options)

    @property
    def name(self) -> str:
        """The method's name, for messages."""
        return str(getattr(self.method, "__name__", self.method))

    @property
    def resolved_allocation(self) -> str:
        """The allocation that the user chose, or else the method's own."""
        meant: str = getattr(self.make_plan, "allocation", "uniform")
        return self.allocation or meant

    def to_save(self) -> dict[str, Any]:
        """Return the settings that must be the same when a checkpoint is resumed, as plain values."""
        others = {name: getattr(self, name) for name in ("sparsity", "pattern", "seed", "storage")}
        scaling = {"lr_scaling": parse_lr_scaling(self.lr_scaling)}
        return {"method": self.name, "allocation": self.resolved_allocation, **scaling, **others}

    # The model

    def begun_from(self, sparse: SparseModel) -> Arguments:
        """Return the arguments with the settings of a SparseModel, whose mask is the first one."""
        own = internals(sparse)
        its = {name: getattr(own, name) for name in ("allocation", "keep_dense", "include", "seed", "storage")}
        its |= {"pattern": own.pattern.name, "lr_scaling": own.optimizers.rates.exponent, "initial_mask": "as_is"}
        for name, value in its.items():
            given = getattr(self, name)
            if given not in (value, Arguments.__dataclass_fields__[name].default):
                raise GrowpruneError(
                    f"sparsify got {name}={given!r}, but the SparseModel has {name}={value!r}: set it only there"
                )
        if not self._takes_mask:
            raise GrowpruneError(f"{self.name} cannot start from a SparseModel: use cyclic_gap, gradual_gap or rigl")
        own.target_sparsity = self.sparsity
        return replace(self, **its)

    def kept_dense(self, model: nn.Module) -> tuple[str, ...]:
        """Return the names or globs that are never pruned, frozen layers too."""
        named = output_layers(model)[0] if self.keep_dense == "auto" else as_names(self.keep_dense, "keep_dense")
        return tuple(dict.fromkeys((*named, *frozen_layers(model, include=self.include))))

    def cut(self, model: nn.Module) -> Partition:
        """Divide a model into the parts that grow in turn."""
        kind = getattr(self.make_plan, "partition", "contiguous")
        return cut(model, self.parts, kind=kind, keep_dense=self.kept_dense(model), include=self.include)

    def _make_sparse(self, model: nn.Module) -> SparseModel:
        """Create the SparseModel with the plan's sparsity, which is 0 for the dense baseline."""
        return SparseModel(
            model,
            sparsity=self.sparsity if "sparsity" in self._parameters else 0.0,
            allocation=self.resolved_allocation,
            pattern=self.pattern,
            keep_dense=self.kept_dense(model),
            include=self.include,
            seed=self.seed,
            storage=self.storage,
            lr_scaling=self.lr_scaling,
            rescale=not is_normalized(model),
        )

    def first_mask(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> FirstMask:
        """Return how the plan's first mask is chosen: by the user, or by inspecting the model."""
        if not self._takes_mask:
            return FirstMask(None)
        if self.initial_mask in BY_DATA:
            return self._prune_by_data(model)
        can_begin, weights = self._can_begin_at, self.prunable(model)
        return choose_mask(model, weights, optimizers, asked=self.initial_mask, can_begin_at=can_begin)

    def prunable(self, model: nn.Module) -> tuple[Weight, ...]:
        """The weights of a model that may be pruned."""
        return prunable_weights(model, keep_dense=self.kept_dense(model), include=self.include)

    def _can_begin_at(self, found: float) -> bool:
        """True if the plan can start at the present sparsity of the model, counted over all layers."""
        is_first = found <= self.sparsity if is_rising(self._parameters, self.options) else found == self.sparsity
        return is_first and self.resolved_allocation in ("global", "global_no_floor")

    def _prune_by_data(self, model: nn.Module) -> FirstMask:
        """Prune a trained model by its inputs to the plan's first sparsity; the plan keeps these zeros."""
        parts, by_magnitude = self.cut(model), FirstMask("magnitude")
        options, _ = self.resolved(len(parts), self.iterations or ANY_LENGTH, 1, by_magnitude)
        first = next(walk(self.make_plan(parts, **options))).phase.edits[0]
        sparse = prune_pretrained(
            model,
            self.calibration,
            sparsity=first.to or 0.0,
            by=self.initial_mask,
            pattern=self.pattern,
            # a layer is pruned by itself, so no ranking can be global; equal sparsity would ruin small layers
            allocation="uniform" if self.resolved_allocation == "uniform" else "erk",
            keep_dense=self.kept_dense(model),
            include=self.include,
        )
        found = sparse.sparsity
        sparse.to_dense_()
        return FirstMask("as_is", found)

    # The plan

    def cursor(
        self,
        model: nn.Module,
        *,
        first: FirstMask,
        iterations: int | None = None,
        iterations_per_epoch: int | None = None,
        remedy: Callable[[int], str] = "iterations={}".format,
        score: Callable[[SparseModel, By], None] | None = None,
        sparse: SparseModel | None = None,
    ) -> Cursor:
        """Create the SparseModel, and a cursor at the start of the plan.

        Args:
            first: how the first mask is chosen; when resuming, that of the checkpoint.
            iterations: the total optimizer steps of a trainer, if a trainer owns the loop.
            iterations_per_epoch: its optimizer steps in an epoch, if known.
            remedy: returns the setting for a training of a given number of steps, for an error.
            score: called if the first edit needs gradients; it calls `sparse.score`.
            sparse: the SparseModel, if there is one already.
        """
        plan, per_epoch = self.plan(self.cut(model), first, iterations, iterations_per_epoch, remedy)
        made = self._make_sparse(model) if sparse is None else sparse
        # a trained model wants the rates that it was given, and where density is low from the start they are too high
        internals(made).optimizers.rates.is_on = first.initial_mask == "random" and "start" in self._parameters
        share_gradients(made)
        look = None if score is None else functools.partial(score, made)
        with given_back(made if sparse is None else None):
            return Cursor(made, plan, iterations_per_epoch=per_epoch, score=look)

    def plan(
        self,
        parts: Partition,
        first: FirstMask,
        iterations: int | None,
        iterations_per_epoch: int | None,
        remedy: Callable[[int], str] = "iterations={}".format,
    ) -> tuple[Plan, int | None]:
        """Return the plan, and the iterations of its epochs."""
        per_epoch = self.iterations_per_epoch or iterations_per_epoch
        total = self._total(per_epoch, iterations)
        options, unit = self.resolved(len(parts), total, per_epoch, first)
        plan = self.make_plan(parts, **options)
        self._check_plan(plan)
        self._warn_of_peak(plan, parts)
        self._check_length(plan, options, iterations or total, unit, remedy)
        return plan, unit

    def _total(self, per_epoch: int | None, of_trainer: int | None) -> int | None:
        """Return the iterations of the whole training; None if the method's own lengths decide."""
        if self.iterations is not None:
            return self.iterations
        if self.epochs is not None and "epochs" not in self._parameters:
            if per_epoch is None:
                raise GrowpruneError(f"epochs={self.epochs} also needs iterations_per_epoch=len(loader)")
            return self.epochs * per_epoch
        return of_trainer

    def resolved(
        self, num_parts: int, iterations: int | None, iterations_per_epoch: int | None, first: FirstMask
    ) -> tuple[dict[str, Any], int | None]:
        """Return the method's options, and the iterations of its epochs.

        Lengths that the user left out are filled in so that the plan takes the whole training. If the user gave none in
        epochs, a method whose phases have epochs gets epochs of one iteration.
        """
        taken, given = self._parameters, self._own_options
        kappa = self.parts if isinstance(self.parts, int) else min(PARTS, num_parts)
        shared = {
            "sparsity": self.sparsity,
            "kappa": kappa,
            "seed": self.seed,
            **first.options(taken, given, self.sparsity),
        }
        options = {name: value for name, value in shared.items() if name in taken} | given
        unit: int | None = iterations_per_epoch
        if "iterations" not in taken:
            unit = 1 if iterations is not None and not {"epochs", "finetune"} & given.keys() else iterations_per_epoch
            if unit is None:
                raise GrowpruneError(f"{self.name} with epochs also needs iterations_per_epoch=len(loader)")
        if iterations is None:
            self._check_complete(options)
            return options, unit
        total = iterations if "iterations" in taken else iterations // (unit or 1)
        return fill_lengths(self.make_plan, options, total, parts=num_parts) | options, unit

    def _check_complete(self, options: Mapping[str, Any]) -> None:
        parameters = list(inspect.signature(self.make_plan).parameters.values())[1:]
        missing = [p.name for p in parameters if p.default is p.empty and p.name not in options]
        if missing:
            raise GrowpruneError(
                f"{self.name} needs the length of the training: pass iterations=epochs * len(loader), the number of "
                f"optimizer steps"
            )

    def _check_plan(self, plan: Plan) -> None:
        """Raise if a single loop cannot carry out the plan."""
        for scheduled in walk(plan):
            if scheduled.branch is not None:
                raise GrowpruneError(
                    f"{self.name} trains branches on several machines, which a single loop cannot do: use cyclic_gap "
                    f"or gradual_gap, or `growprune train`"
                )

    def _warn_of_peak(self, plan: Plan, parts: Partition) -> None:
        """Warn if one part has most of a large model, so that the default limit of live weights cannot be kept."""
        share, total = parts.largest_share, sum(parts.sizes)
        limits = [edit.within or 0 for scheduled in walk(plan) for edit in scheduled.phase.edits]
        if "peak_density" in self.options or not any(limits) or share <= 0.5 or total < LARGE_MODEL:
            return
        peak, largest = math.ceil(max(limits) * 1e4) / 1e4, parts[parts.sizes.index(max(parts.sizes))]
        warn(
            f"up to {peak:.0%} of the prunable weights will be live at a time, because part {largest.name} "
            f"({largest.tensors[0]}, ...) has {share:.0%} of them and grows as a whole. Pass peak_density={peak:g} to "
            f"accept this, or use more parts= if it has several layers, keep_dense=[...], or method='rigl'"
        )

    def _check_length(
        self,
        plan: Plan,
        options: dict[str, Any],
        iterations: int | None,
        per_epoch: int | None,
        remedy: Callable[[int], str],
    ) -> None:
        """Raise if a plan is shorter or longer than the training."""
        length = plan_length(plan, per_epoch or 0)
        if iterations is not None and length != iterations:
            lengths = [f"{k}={v}" for k, v in options.items() if k in ("iterations", "steps", "epochs", "finetune")]
            raise GrowpruneError(
                f"the plan of {self.name} has {length} optimizer steps ({', '.join(lengths)}), but the training has "
                f"{iterations}: set {remedy(length)}, or use options of {self.name} that add up to {iterations}"
            )
