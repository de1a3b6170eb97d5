"""SparseModel: the public face of a model whose weights can be pruned and grown.

Edits change its masks, pruned weights stay exactly zero while attached optimizers train, and live weights are counted.
A Cursor (cursor.py) knows where a model stands in a plan. What other packages need beyond this is in internals.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError, warn
from growprune.masks.allocation import Scope, parse_scope
from growprune.masks.layers import Weight, prunable_weights
from growprune.masks.patterns import Pattern, parse_pattern
from growprune.masks.zeros import check_sparse, masks_of_zeros
from growprune.plan import Action, By, Edit, Part, parse_choice
from growprune.plan.settings import as_float, as_names, as_seed, check_sparsity, check_state
from growprune.sparse.checks import check_model, check_optimizer, check_settings, unpruned
from growprune.sparse.copies import mask_copy
from growprune.sparse.internals import Internals
from growprune.sparse.learning_rates import parse_lr_scaling
from growprune.sparse.optimizers import unwrapped
from growprune.sparse.sharded import sharding
from growprune.sparse.summary import Summary, summarise
from growprune.storage import make_plain

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


class Masks(dict[str, Tensor]):
    """Masks by the names of parameters; a name that is not prunable is an error that lists those that are."""

    def __missing__(self, name: str) -> Tensor:
        raise KeyError(f"{name!r} is not prunable; prunable are {', '.join(self)}")


class SparseModel:
    """A model whose weights can be pruned and grown.

    Args:
        model: any module. It is not rewritten: names, forward pass and `state_dict` stay as they are. With compact
            storage, it may be sharded by FSDP2 already.
        sparsity: the target fraction of zeros, which `prune` goes to by default and `summary` compares with.
        allocation: how sparsity is shared among layers: "uniform", "global" or "erk".
        pattern: which positions may live: "unstructured", a block such as "1x8", or N:M such as "2:4".
        scope: what a global ranking covers when one part is pruned: the whole "model", or the "part".
        keep_dense: names or globs of modules or parameters that are never pruned.
        include: names or globs of parameters to prune that are not the weight of a known kind of layer; they are read
            as (out, in, ...).
        seed: decides every random mask.
        storage: how sparse weights are stored: "masked" (dense, with a mask) or "compact" (live values only).
        lr_scaling: let learning rates follow density. While an attached optimizer steps, a layer of density d trains at
            lr * d ** -lr_scaling, at most 10 * lr. 0 leaves rates alone, 1 divides them by the density; "auto" is 0.

    Everything is alive at first; the edits of a plan, or `prune`, make it sparse. `copy.deepcopy` gives an independent
    copy of the model and its masks, attached to no optimizer.

    Examples:
        >>> sparse = SparseModel(nn.Linear(10, 100), sparsity=0.9)
        >>> sparse.prune()
        >>> sparse.num_alive
        100
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sparsity: float,
        allocation: str = "uniform",
        pattern: str | Pattern = "unstructured",
        scope: str | Scope = Scope.MODEL,
        keep_dense: Iterable[str] = (),
        include: Iterable[str] = (),
        seed: int = 0,
        storage: str = "masked",
        lr_scaling: float | Literal["auto"] = "auto",
    ) -> None:
        check_sparsity(sparsity)
        check_model(model, storage=storage)
        self._internals = Internals(
            model,
            sparsity=as_float(sparsity),
            allocation=allocation,
            pattern=parse_pattern(pattern),
            scope=parse_scope(scope),
            keep_dense=as_names(keep_dense, "keep_dense"),
            include=as_names(include, "include"),
            seed=as_seed(seed),
            storage=storage,
            lr_scaling=parse_lr_scaling(lr_scaling),
        )
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
        """Make a SparseModel of a model that is sparse already, such as a pruned checkpoint: its zeros are dead.

        Args:
            sparsity: the target fraction of zeros; the fraction that the model has if not given.
            settings: further arguments of `SparseModel`; those named here are the same as there.

        A dense model is refused. Live weights that happen to be zero are taken for dead.

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
        masks = masks_of_zeros(model, weights, pattern)
        found = check_sparse(weights, masks, pattern)
        sparse = cls(
            model,
            sparsity=found if sparsity is None else sparsity,
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
        """The module that is sparse."""
        return self._internals.model

    @property
    def sparsity(self) -> float:
        """The target fraction of zeros."""
        return self._internals.sparsity

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weights that may be pruned."""
        return self._internals.weights

    # Edits

    def prune(
        self, part: Part | None = None, *, to: float | None = None, share: float | None = None, by: By = By.MAGNITUDE
    ) -> None:
        """Keep the best weights of a part (the whole model by default) and make the others exactly zero."""
        to = self.sparsity if to is None and share is None else to
        self.apply(Edit(Action.PRUNE, part or self._internals.whole, by, to, share))

    def grow(
        self, part: Part | None = None, *, to: float | None = None, share: float | None = None, by: By = By.RANDOM
    ) -> None:
        """Let more weights of a part (the whole model by default) live, all by default, each from exactly zero."""
        to = 0.0 if to is None and share is None else to
        self.apply(Edit(Action.GROW, part or self._internals.whole, by, to, share))

    def apply(self, *edits: Edit) -> None:
        """Apply edits in order; the state of attached optimizers follows."""
        self._internals.apply(edits)

    def score(self, by: By, losses: Sequence[Callable[[], Tensor]]) -> None:
        """Look at gradients before any training, so that the next edit can choose by them.

        Args:
            losses: functions that compute a loss each; GraSP calls them twice.
        """
        own, by = self._internals, parse_choice(By, by)
        own.check_by(by)
        if callable(losses) or not losses:
            given = repr(losses) if callable(losses) else "empty"
            raise GrowpruneError(f"losses is {given}, but must be a list of functions that compute a loss each")
        own.notice_shards()
        for stored in own.stored.values():  # there may be no optimizer yet
            stored.hook_gradients()
        own.gradients.observe(by, self.model, losses)

    # Training

    def shard(
        self, mesh: DeviceMesh, *, units: Sequence[str] | None = None, masks: bool = False, **settings: Any
    ) -> nn.Module:
        """Shard the model over the ranks of a mesh with torch's FSDP2; needs compact storage. Make optimizers after it.

        Every rank then holds a share of the live values, and sends live values only. `fully_shard` calls of your own,
        inner modules first, do the same. Returns the model.

        Args:
            units: names or globs of the modules that are gathered one at a time; if not given, the blocks in the
                model's lists (ModuleList, Sequential). What is in none of them is gathered with the model.
            masks: whether masks are sharded too, and those of a layer gathered whenever it computes. All ranks must
                then call whatever looks at a mask (`summary`, `num_alive`).
            settings: further arguments of `torch.distributed.fsdp.fully_shard`, such as mp_policy.
        """
        self._internals.check_not_released()
        sharding().shard(self._internals, mesh, units=units, masks=masks, **settings)
        return self.model

    def attach(self, optimizer: Optimizer) -> Optimizer:
        """Keep what is pruned exactly zero under this optimizer: gradients, weights, and its state.

        Works with any optimizer: state shaped like its parameter is masked, other state is left alone.
        Returns the optimizer, so that it can be made and attached in one line.
        """
        own = self._internals
        own.check_not_released()
        own.notice_shards()
        inner = unwrapped(optimizer)
        check_optimizer(inner)
        own.optimizers.attach(inner, own={id(parameter) for parameter in self.model.parameters()})
        self.enforce()
        return optimizer

    def enforce(self) -> None:
        """Make weights, and the state of attached optimizers, exactly zero off the masks."""
        self._internals.optimizers.enforce()

    def mask_copy(self, copy: nn.Module) -> None:
        """Make another copy of the model (a moving average, a deepcopy) exactly as sparse as this one.

        Do so before a moving average is used or saved: averaged over an edit, it has the weights of both masks. The
        copy may be wrapped, as by AveragedModel. A compact copy is as sparse as the model was when it was made; after
        an edit, make it anew.
        """
        mask_copy(copy, self._internals.stored)

    def to_dense_(self) -> nn.Module:
        """Make the model a plain one that happens to hold zeros, and let it go, for pickles, traces and exports.

        Masks can still be read and saved. But edits are refused from now on, and so are steps of optimizers that were
        attached; a new SparseModel can be made of the model. Returns the model.
        """
        own = self._internals
        own.check_not_released()
        if own.ranks is not None:
            raise GrowpruneError(
                "the model is sharded, and no rank may have all of it dense: save it, and load it into a fresh model"
            )
        make_plain(self.model, own.stored, own.pattern)
        own.optimizers.release()
        own.storage, own.is_released = "masked", True
        return self.model

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseModel:
        memo[id(self)] = clone = object.__new__(type(self))
        clone._internals = copy.deepcopy(self._internals, memo)
        return clone

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to pickle, which would lose the attached optimizers silently."""
        raise GrowpruneError(
            "a SparseModel cannot be pickled: keep its state_dict() and its model's, or write a file with "
            "growprune.save(sparse, path)"
        )

    # State

    def state_dict(self) -> dict[str, Any]:
        """The masks, and the gradients that the next edit looks at.

        With the state of the model, of the optimizer and of the Cursor, this is all that an exact resume needs.
        """
        own = self._internals
        return {
            "masks": own.packed_masks(),
            "num_edits": own.editor.num_edits,
            "gradients": own.gradients.state_dict(),
            "settings": own.decisive,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state. Load the model's own state after it: masks decide the length of compact weights.

        With masked storage the order does not matter. The state of a SparseModel that was made with another seed,
        allocation or pattern is refused.
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

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, *, device: torch.device | str | None = None
    ) -> dict[str, Any]:
        """Like `optimizer.state_dict()`, but of state shaped like a sparse weight, only that of live weights.

        Args:
            device: where the state goes; each tensor's own device if not given.
        """
        return self._internals.optimizers.live_state(optimizer, device)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load what `optimizer_state` gave, whatever storage it was taken from."""
        self._internals.optimizers.load_live_state(optimizer, state)

    # Live weights

    @property
    def masks(self) -> dict[str, Tensor]:
        """Copies of the masks of all prunable parameters, by name: bool tensors, True where a weight lives."""
        return Masks({name: stored.mask().clone() for name, stored in self._internals.stored.items()})

    @property
    def num_alive(self) -> int:
        """The number of prunable weights that live."""
        return sum(self._internals.alive_by_weight().values())

    @property
    def num_prunable(self) -> int:
        """The number of weights that may be pruned, dead or alive."""
        return sum(weight.numel for weight in self.weights)

    @property
    def is_at_target(self) -> bool:
        """True if the model is at its target sparsity: as many weights live as `prune()` leaves."""
        return self._internals.is_at_target

    def summary(self, example: Any = None) -> Summary:
        """Count the live weights, per layer and in all; with an example input, FLOPs too. Print it for a table."""
        self._internals.check()
        return summarise(self, example)


def check_sparse_model(given: object, who: str) -> None:
    """Raise if the model itself was given where its SparseModel is wanted."""
    if not isinstance(given, SparseModel):
        raise GrowpruneError(
            f"{who} was given a {type(given).__name__}, but takes a SparseModel: make one of the model, as in "
            f"SparseModel(model, sparsity=0.9)"
        )
