"""What the integrations share: all that is asked of the user, and how a cursor is made of it."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, distributed, nn

from growprune.errors import GrowpruneError
from growprune.masks.layers import layer_weights, matches
from growprune.masks.partition import Partition
from growprune.masks.partition_kinds import PartitionConfig, parse_partition
from growprune.methods import find_method
from growprune.plan import By, Plan, walk
from growprune.plan.lengths import PARTS, fill_lengths, plan_length
from growprune.plan.settings import check_counts, check_sparsity
from growprune.sparse.cursor import Cursor
from growprune.sparse.internals import internals
from growprune.sparse.learning_rates import parse_lr_scaling
from growprune.sparse.model import SparseModel
from growprune.storage import parse_storage


@dataclass(frozen=True)
class Settings:
    """What a user says of a sparse training that a trainer carries out.

    Args:
        method: a name in `growprune.methods.METHODS`, or a method of one's own.
        kappa: how many parts the model is cut into; 4 if not given, or as many as it has layers, if these are fewer.
        allocation, partition: what the method is meant for, if not given. A partition is "contiguous", "balanced",
            "per_layer", a value such as `growprune.balanced(4)`, a list of lists of names, or a `Partition`.
        keep_dense: names or globs, or "auto" for `heads(model)`.
        iterations_per_epoch: how many optimizer steps an epoch of the plan has; those of the trainer's if not given.
        options: the method's own.
    """

    method: str | Callable[..., Plan]
    sparsity: float
    kappa: int | None = None
    storage: str = "masked"
    lr_scaling: float | Literal["auto"] = "auto"
    allocation: str | None = None
    pattern: str = "unstructured"
    keep_dense: str | Sequence[str] = "auto"
    include: Sequence[str] = ()
    partition: str | Partition | PartitionConfig | Sequence[Sequence[str]] | None = None
    seed: int = 0
    iterations_per_epoch: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_sparsity(self.sparsity)
        counts = {"kappa": self.kappa, "iterations_per_epoch": self.iterations_per_epoch}
        check_counts(1, **{name: count for name, count in counts.items() if count is not None})
        parse_storage(self.storage)
        parse_lr_scaling(self.lr_scaling)
        taken = [name for name in self._parameters if name not in ("sparsity", "kappa")]
        for name in self.options:
            if name not in taken:
                close = difflib.get_close_matches(name, [*taken, *Settings.__dataclass_fields__], 1)
                hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(taken) or 'none'}"
                raise GrowpruneError(f"{self.name} takes no option {name!r}: {hint}")

    @property
    def make_plan(self) -> Callable[..., Plan]:
        return self.method if callable(self.method) else find_method(self.method)

    @property
    def _parameters(self) -> list[str]:
        """What the method takes beside the partition."""
        return list(inspect.signature(self.make_plan).parameters)[1:]

    @property
    def name(self) -> str:
        """The method's name, for messages."""
        return str(getattr(self.method, "__name__", self.method))

    def to_save(self) -> dict[str, Any]:
        """The settings that a checkpoint can only be resumed with, as plain values."""
        allocation = self.allocation or getattr(self.make_plan, "allocation", "uniform")
        others = {name: getattr(self, name) for name in ("sparsity", "pattern", "seed", "storage", "lr_scaling")}
        return {"method": self.name, "allocation": allocation, **others}

    def cursor(
        self,
        model: nn.Module,
        *,
        iterations: int,
        iterations_per_epoch: int | None,
        remedy: Callable[[int], str],
        accumulate: int | None = None,
        score: Callable[[SparseModel, By], None] | None = None,
        sparse: SparseModel | None = None,
    ) -> Cursor:
        """Make a model sparse, and a cursor that is about to begin a plan just as long as the trainer's training.

        Args:
            iterations: how many optimizer steps the trainer makes in all.
            iterations_per_epoch: how many it makes in an epoch, if that is known.
            remedy: what to set in the trainer for a training of so many steps.
            accumulate: as for `Cursor`.
            score: called where the first edit looks at gradients; calls `sparse.score`, while `looking`.
            sparse: the sparse model, if it was made before.
        """
        parts = self.cut(model)
        options, per_epoch = self.resolved(len(parts), iterations, iterations_per_epoch)
        plan = self.make_plan(parts, **options)
        self._check_plan(plan)
        self._check_length(plan, options, iterations, per_epoch, remedy)
        sparse = self._make_sparse(model, options.get("sparsity", 0.0)) if sparse is None else sparse
        share_gradients(sparse)
        look = None if score is None else functools.partial(score, sparse)
        return Cursor(sparse, plan, iterations_per_epoch=per_epoch, accumulate=accumulate, score=look)

    def _make_sparse(self, model: nn.Module, sparsity: float) -> SparseModel:
        """Make a model sparse: to the plan's sparsity, which is 0 for the dense reference."""
        return SparseModel(
            model,
            sparsity=sparsity,
            allocation=self.to_save()["allocation"],
            pattern=self.pattern,
            keep_dense=self._kept_dense(model),
            include=self.include,
            seed=self.seed,
            storage=self.storage,
            lr_scaling=self.lr_scaling,
        )

    def _kept_dense(self, model: nn.Module) -> tuple[str, ...]:
        if self.keep_dense == "auto":
            return heads(model)
        return (self.keep_dense,) if isinstance(self.keep_dense, str) else tuple(self.keep_dense)

    def cut(self, model: nn.Module) -> Partition:
        """Cut a model into the parts that grow in turn."""
        keep_dense = self._kept_dense(model)
        wanted: Any = self.partition or getattr(self.make_plan, "partition", "contiguous")
        if isinstance(wanted, Partition):
            return wanted
        if isinstance(wanted, str):
            layers = Partition.per_layer(model, keep_dense=keep_dense, include=self.include)
            wanted = parse_partition(wanted, kappa=self.kappa or min(PARTS, len(layers)))
        if isinstance(wanted, PartitionConfig):
            return wanted.cut(model, keep_dense=keep_dense, include=self.include)
        return Partition.of(model, wanted)

    def resolved(
        self, num_parts: int, iterations: int, iterations_per_epoch: int | None
    ) -> tuple[dict[str, Any], int | None]:
        """Return the method's options, and the iterations of its epochs.

        Lengths that the user left out are filled in so that the plan takes the whole training. If the user gave none in
        epochs, a method whose phases have epochs gets epochs of one iteration.
        """
        taken = self._parameters
        shared = {"sparsity": self.sparsity, "kappa": self.kappa or min(PARTS, num_parts), "seed": self.seed}
        options = {name: value for name, value in shared.items() if name in taken} | dict(self.options)
        per_epoch, unit = self.iterations_per_epoch or iterations_per_epoch, 1
        if "iterations" not in taken and {"epochs", "finetune"} & self.options.keys():
            if per_epoch is None:
                raise GrowpruneError(
                    f"the trainer cannot tell how many steps an epoch has, but {self.name} is given epochs: give "
                    f"iterations_per_epoch too"
                )
            unit = per_epoch
        lengths = fill_lengths(self.make_plan, options, iterations // unit, parts=num_parts)
        return lengths | options, per_epoch if "iterations" in taken else unit

    def _check_plan(self, plan: Plan) -> None:
        """Refuse plans that a single trainer cannot carry out."""
        for scheduled in walk(plan):
            if scheduled.branch is not None:
                raise GrowpruneError(
                    f"{self.name} trains branches on several machines, which a trainer cannot: use cyclic_gap or "
                    f"gradual_gap, or `growprune train`"
                )

    def _check_length(
        self, plan: Plan, options: dict[str, Any], iterations: int, per_epoch: int | None, remedy: Callable[[int], str]
    ) -> None:
        """Refuse a plan that is not over when the trainer is, or goes on after it."""
        length = plan_length(plan, per_epoch or 0)
        if length != iterations:
            told = ", ".join(
                f"{k}={v}" for k, v in options.items() if k in ("iterations", "steps", "epochs", "finetune")
            )
            raise GrowpruneError(
                f"the plan of {self.name} has {length} optimizer steps ({told}), but the trainer makes {iterations}: "
                f"set {remedy(length)}, or give {self.name} options that add up to {iterations}"
            )


def share_gradients(sparse: SparseModel) -> None:
    """Let edits by gradient see the gradients of all processes, so that all choose the same weights."""
    if num_processes() > 1 and internals(sparse).ranks is None:  # those of a sharded model are summed already
        internals(sparse).gradients.add_up = _summed


def num_processes() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _summed(tensor: Tensor) -> Tensor:
    total = tensor.to_dense().contiguous().clone() if tensor.is_sparse else tensor.contiguous().clone()
    distributed.all_reduce(total)
    return total


def heads(model: nn.Module) -> tuple[str, ...]:
    """The layers that make a model's output, which are few weights and suffer most: keep_dense="auto".

    Of a model of transformers, the output head, and what lies outside of its base model; of any other, the last layer.
    A head that is tied to an embedding is no layer that may be pruned, and is not named.
    """
    layers = list(layer_weights(model))
    outer = _inside_adapters(model)
    if not hasattr(outer, "base_model_prefix"):
        return tuple(layers[-1:] if len(layers) > 1 else ())
    base = getattr(outer, outer.base_model_prefix, None) if outer.base_model_prefix else None
    names = {id(module): name for name, module in model.named_modules()}
    inside = names.get(id(base), "")
    found = [] if not inside else [path for path in layers if not matches(path, inside)]
    output = names.get(id(outer.get_output_embeddings())) if hasattr(outer, "get_output_embeddings") else None
    found += [path for path in layers if path == output and path not in found]
    return tuple(found if len(found) < len(layers) else ())


def _inside_adapters(model: nn.Module) -> Any:
    """The model itself, where PEFT has wrapped it."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model
