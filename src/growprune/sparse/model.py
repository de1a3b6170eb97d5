"""SparseModel: a model whose weights can be pruned and grown.

Edits change its masks, and pruned weights stay exactly zero while attached optimizers train. A Cursor (cursor.py)
applies a plan to it. internals.py has what other packages need beyond the public methods.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError, warn
from growprune.masks.layers import Weight, prunable_weights
from growprune.masks.patterns import Pattern, parse_pattern
from growprune.masks.zeros import check_sparse, masks_of_zeros
from growprune.plan import By, Edit, Part, Score, grow, parse_choice, prune
from growprune.plan.settings import as_float, as_names, as_seed, check_sparsity, check_state
from growprune.sparse.checks import check_model, check_settings, unpruned
from growprune.sparse.copies import mask_copy
from growprune.sparse.internals import Internals
from growprune.sparse.learning_rates import parse_lr_scaling
from growprune.sparse.sharded import sharding
from growprune.sparse.summary import Summary, summarise
from growprune.storage import make_plain

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


class Masks(dict[str, Tensor]):
    """Masks by parameter name. An unknown name raises an error that lists the prunable parameters."""

    def __missing__(self, name: str) -> Tensor:
        raise KeyError(f"{name!r} is not a prunable parameter; these are: {', '.join(self)}")


class SparseModel:
    """A model whose weights can be pruned and grown.

    Args:
        model: any module. It is not rewritten: names, forward pass and `state_dict` stay as they are. With compact
            storage, it may be sharded by FSDP2 already.
        sparsity: the target fraction of zeros. `prune` goes to it by default, and `summary` compares with it.
        allocation: how sparsity is divided among layers: "uniform" (the default), "global" or "erk". A `Cursor` refuses
            a plan whose method is designed for another allocation, unless you set it here.
        pattern: which positions may be live: "unstructured", a block such as "1x8", or N:M such as "2:4".
        keep_dense: names or globs of modules or parameters that are never pruned.
        include: names or globs of further parameters to prune, which belong to no known kind of layer. They are read as
            (out, in, ...).
        seed: the seed of every random mask.
        storage: how sparse weights are stored: "masked" (dense, with a mask) or "compact" (live values only).
        lr_scaling: scale learning rates with density. While an attached optimizer steps, a layer of density d trains at
            lr * d ** -lr_scaling, at most 10 * lr. 0 leaves rates unchanged, 1 divides by the density; "auto" is 1 for
            Adam-like optimizers and 0 for others.
        rescale: multiply the weights that a random mask keeps by 1 / sqrt(density of their layer), so that activations
            stay as large. Random masks are for untrained models.

    All weights are live at first; the edits of a plan, or `prune`, make the model sparse. `copy.deepcopy` returns an
    independent copy of the model and its masks, attached to no optimizer.

    Examples:
        >>> sparse = SparseModel(nn.Linear(10, 100), sparsity=0.9)
        >>> sparse.prune()
        >>> sparse.num_alive
        100
    """

    def __init__(
        self,
        model: nn.Module,
        sparsity: float,
        *,
        allocation: str | None = None,
        pattern: str | Pattern = "unstructured",
        keep_dense: Iterable[str] = (),
        include: Iterable[str] = (),
        seed: int = 0,
        storage: str = "masked",
        lr_scaling: float | Literal["auto"] = 0.0,
        rescale: bool = False,
    ) -> None:
        check_sparsity(sparsity)
        check_model(model, storage=storage)
        self._internals = Internals(
            model,
            sparsity=as_float(sparsity),
            allocation=allocation or "uniform",
            pattern=parse_pattern(pattern),
            keep_dense=as_names(keep_dense, "keep_dense"),
            include=as_names(include, "include"),
            seed=as_seed(seed),
            storage=storage,
            lr_scaling=parse_lr_scaling(lr_scaling),
            rescale=rescale,
        )
        self._internals.is_allocation_given = allocation is not None
        for message in unpruned(model, self.weights, self._internals.keep_dense) if sparsity > 0 else ():
            warn(message)

    @classmethod
    def from_zeros(
        cls,
        model: nn.Module,
        *,
        sparsity: float | None = None,
        allocation: str = "global",
        pattern: str | Pattern = "unstructured",
        keep_dense: Iterable[str] = (),
        include: Iterable[str] = (),
        **settings: Any,
    ) -> SparseModel:
        """Create a SparseModel from a model that is already sparse, such as a pruned checkpoint; its zeros stay pruned.

        Args:
            sparsity: the target fraction of zeros; by default the fraction that the model has.
            settings: further arguments of `SparseModel`; those named here mean the same as there.

        A dense model is an error. Live weights that happen to be zero count as pruned.

        Examples:
            >>> layer = nn.Linear(4, 2)
            >>> _ = layer.weight.data[:, 1:].zero_()
            >>> SparseModel.from_zeros(layer).num_alive
            2
        """
        pattern = parse_pattern(pattern)
        keep_dense, include = as_names(keep_dense, "keep_dense"), as_names(include, "include")
        check_model(model)
        weights = prunable_weights(model, keep_dense=keep_dense, include=include)
        masks = masks_of_zeros(model.get_parameter, weights, pattern)
        found = check_sparse(weights, masks, pattern)
        sparse = cls(
            model,
            found if sparsity is None else sparsity,
            allocation=allocation,
            pattern=pattern,
            keep_dense=keep_dense,
            include=include,
            **settings,
        )
        for name, mask in masks.items():
            sparse._internals.stored[name].set_mask(mask)
        return sparse

    @property
    def model(self) -> nn.Module:
        """The module that becomes sparse."""
        return self._internals.model

    @property
    def sparsity(self) -> float:
        """The fraction of the prunable weights that are zero now."""
        return 1 - self.num_alive / self.num_prunable if self.num_prunable else 0.0

    @property
    def target_sparsity(self) -> float:
        """The fraction of zeros to reach."""
        return self._internals.target_sparsity

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weights that may be pruned."""
        return self._internals.weights

    # Edits

    def prune(
        self,
        part: Part | None = None,
        *,
        to: float | None = None,
        share: float | None = None,
        by: By | Score = By.MAGNITUDE,
    ) -> None:
        """Keep the best weights of a part (by default the whole model) and set the others to exactly zero."""
        to = self.target_sparsity if to is None and share is None else to
        self.apply(prune(part or self._internals.whole, to=to, share=share, by=by))

    def grow(
        self,
        part: Part | None = None,
        *,
        to: float | None = None,
        share: float | None = None,
        by: By | Score = By.RANDOM,
    ) -> None:
        """Make more weights of a part (by default the whole model) live, by default all, starting at exactly zero."""
        self.apply(grow(part or self._internals.whole, to=to, share=share, by=by))

    def apply(self, *edits: Edit) -> None:
        """Apply edits in order; the state of attached optimizers follows."""
        self._internals.apply(edits)

    def score(self, by: By, losses: Sequence[Callable[[], Tensor]]) -> None:
        """Compute gradients before training, so that the next edit can choose by them.

        Args:
            losses: functions that each compute a loss; GraSP calls them twice.
        """
        own, by = self._internals, parse_choice(By, by)
        own.check_by(by)
        if callable(losses) or not losses:
            given = repr(losses) if callable(losses) else "an empty list"
            raise GrowpruneError(f"losses must be a list of functions that each compute a loss, got {given}")
        own.notice_shards()
        for stored in own.stored.values():  # there may be no optimizer yet
            stored.hook_gradients()
        own.gradients.observe(by, self.model, losses)

    # Training

    def shard(
        self, mesh: DeviceMesh, *, units: Sequence[str] | None = None, masks: bool = False, **settings: Any
    ) -> nn.Module:
        """Shard the model over the ranks of a mesh with torch's FSDP2. Create optimizers after it.

        It needs compact storage. Every rank then holds a share of the live values, and sends only live values. You may
        call `fully_shard` yourself instead, inner modules first. Returns the model.

        Args:
            units: names or globs of the modules that are gathered one at a time; by default the blocks in the model's
                lists (ModuleList, Sequential). All other parameters are gathered with the model.
            masks: shard masks too, and gather those of a layer whenever it computes. All ranks must then call every
                method that reads a mask (`summary`, `num_alive`).
            settings: further arguments of `torch.distributed.fsdp.fully_shard`, such as mp_policy.
        """
        self._internals.check_not_released()
        sharding().shard(self._internals, mesh, units=units, masks=masks, **settings)
        return self.model

    def attach(self, optimizer: Optimizer) -> Optimizer:
        """Keep pruned weights exactly zero under this optimizer: gradients, weights and optimizer state.

        It does not advance a plan: call `Cursor.attach` for that instead. It works with any optimizer: state with the
        shape of its parameter is masked, other state is left alone. Returns the optimizer, so that you can create and
        attach it in one line.
        """
        self._internals.attach(optimizer)
        return optimizer

    def enforce(self) -> None:
        """Set pruned weights, and their state in attached optimizers, to exactly zero."""
        self._internals.optimizers.enforce()

    def mask_copy(self, copy: nn.Module) -> None:
        """Apply the masks to a copy of the model, such as a moving average or a deepcopy.

        Do this before you use or save a moving average: averaged across an edit, it has the weights of both masks. The
        copy may be wrapped, as by AveragedModel. A compact copy keeps the mask that it was copied with; copy the model
        again after an edit.
        """
        mask_copy(copy, self._internals.stored)

    def to_dense_(self) -> nn.Module:
        """Turn the model back into a plain module with zeros, for pickling, tracing and export. Returns the model.

        Masks can still be read and saved. Edits and steps of attached optimizers raise an error from now on. You can
        create a new SparseModel from the model.
        """
        own = self._internals
        own.check_not_released()
        if own.ranks is not None:
            raise GrowpruneError(
                "a sharded model cannot be made dense on one rank: save it, and load it into a new model"
            )
        make_plain(self.model, own.stored, own.pattern)
        own.optimizers.release()
        own.storage, own.is_released = "masked", True
        return self.model

    def __repr__(self) -> str:
        own = self._internals
        now = "" if own.shards_masks else f"sparsity {self.sparsity:.4g} of "  # counting those takes all ranks
        what = f"{self.num_prunable:,} prunable weights, storage={own.storage!r}"
        return f"SparseModel({type(self.model).__name__}, {now}target {self.target_sparsity:.4g}, {what})"

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseModel:
        memo[id(self)] = clone = object.__new__(type(self))
        clone._internals = copy.deepcopy(self._internals, memo)
        return clone

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to pickle, which would lose the attached optimizers silently."""
        raise GrowpruneError(
            "a SparseModel cannot be pickled: save its state_dict() and that of its model, or write a file with "
            "growprune.save(sparse, path)"
        )

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, and the gradients that the next edit needs.

        Together with the states of the model, of the optimizer and of the Cursor, an exact resume needs nothing else.
        """
        own = self._internals
        return {
            "masks": own.packed_masks(),
            "num_edits": own.editor.num_edits,
            "gradients": own.gradients.state_dict(),
            "settings": own.decisive,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state. Load the model's own state after it, because masks decide the length of compact weights.

        With masked storage the order does not matter. A state with another seed, allocation or pattern is an error.
        """
        own = self._internals
        own.check_not_released()
        own.notice_shards()
        check_state(state, "masks", "num_edits", "gradients", "settings")
        check_settings(state["settings"], own.decisive)
        own.set_packed_masks(state["masks"])
        own.editor.num_edits = state["num_edits"]
        own.gradients.load_state_dict(state["gradients"])
        self.enforce()

    # Live weights

    @property
    def masks(self) -> dict[str, Tensor]:
        """Copies of the masks of all prunable parameters, by name: bool tensors, True where a weight is live."""
        return Masks({name: stored.mask().clone() for name, stored in self._internals.stored.items()})

    @property
    def num_alive(self) -> int:
        """The number of live prunable weights."""
        return sum(self._internals.alive_by_weight().values())

    @property
    def num_prunable(self) -> int:
        """The number of prunable weights, live or pruned."""
        return sum(weight.numel for weight in self.weights)

    @property
    def is_at_target(self) -> bool:
        """True if the model is at its target sparsity."""
        return self._internals.is_at_target

    def summary(self, example: Any = None) -> Summary:
        """Count the live weights per layer and in total, and FLOPs if given an example input. Print it for a table."""
        self._internals.check()
        return summarise(self, example)


def check_sparse_model(given: object, who: str) -> None:
    """Raise if the argument is not a SparseModel, such as the model itself."""
    if not isinstance(given, SparseModel):
        has_one = isinstance(getattr(given, "sparse", None), SparseModel)
        remedy = "give its attribute .sparse" if has_one else "create one with SparseModel(model, sparsity=0.9)"
        raise GrowpruneError(f"{who} needs a SparseModel, got a {type(given).__name__}: {remedy}")
