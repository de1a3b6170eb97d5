"""SparseModel: a model whose weights can be pruned and grown.

The model owns its SparseModel, and with it the masks: they live as long as the model, whoever holds a handle. Edits
change the masks. A Cursor (cursor.py) applies those of a plan. stepper.py has what happens around each optimizer step.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from growprune.errors import MAX_VALUE, GrowpruneError, shorten, warn
from growprune.masks.allocation import parse_cost_power
from growprune.masks.bits import Snapshot, check_packed, like, pack, unpack, whole
from growprune.masks.inspection import already_sparse, check_sparse, masks_of_zeros, unpruned
from growprune.masks.layers import Weight, few, prunable_weights
from growprune.masks.patterns import Pattern, Unstructured, in_one_go, parse_pattern
from growprune.plan import By, Edit, Part, Score, grow, parse_choice, prune
from growprune.plan.settings import (
    as_float,
    as_names,
    as_seed,
    check_share,
    check_sparsity,
    check_state,
    parse_lr_scaling,
)
from growprune.sparse.editor import Editor
from growprune.sparse.flops import cost_factors
from growprune.sparse.gradients import Gradients
from growprune.sparse.stepper import (
    INSTEAD,
    LR_RAMP,
    OWNERS,
    STALE,
    Exponent,
    Stepper,
    check_optimizer,
    check_rates,
    first_to_differ,
    is_replicated,
    stepper_of,
    unwrapped,
    watch_optimizers,
)
from growprune.sparse.summary import Summary, summarise
from growprune.storage import Masked, SparseParameter, make_plain, store
from growprune.storage.adapters import stored_in
from growprune.storage.compact import layouts_of
from growprune.storage.compact_layers import LAYOUTS
from growprune.storage.masked import is_wrapped, plain

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from growprune.sparse.cursor import Cursor
    from growprune.sparse.rules import RunningRule


Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)

OWNED = "_growprune_sparse_model"
"""The attribute of a module that holds its SparseModel."""


class Masks(dict[str, Tensor]):
    """Masks by parameter name. An unknown name raises an error that lists the prunable parameters."""

    def __missing__(self, name: str) -> Tensor:
        raise KeyError(f"{name!r} is not a prunable parameter; these are: {', '.join(self)}")


def sparse_model_of(model: nn.Module) -> SparseModel | None:
    """Return the SparseModel that a model owns, or None."""
    owned = vars(model).get(OWNED)
    return None if owned is None else owned.sparse


class SparseModel:
    """A model whose weights can be pruned and grown.

    Args:
        model: any module. It is not rewritten: names, forward pass and `state_dict` stay as they are. With compact
            storage, it may be sharded by FSDP2 already.
        sparsity: the target fraction of zeros. `prune` goes to it by default, and `summary` compares with it.
        allocation: "uniform" (the default), "global" or "erk". A `Cursor` refuses a plan whose method is designed for
            another, unless you set it here.
        lr_scaling: as in `sparsify`, but "auto" is 1 for every Adam-like optimizer.
        rescale: as in `sparsify`, for every random prune. Random masks are for untrained models.
        pattern, keep_dense, include, seed, storage, lr_ramp, cost_power, example: as in `sparsify`.
        weights: what `keep_dense` and `include` leave to prune, if it is known, of a model that was checked.

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
        lr_ramp: float = LR_RAMP,
        cost_power: float = 0.0,
        example: Any = None,
        rescale: bool = False,
        weights: Sequence[Weight] | None = None,
    ) -> None:
        check_sparsity(sparsity)
        self.model = model
        """The module that becomes sparse."""
        self.target_sparsity = as_float(sparsity)
        """The fraction of zeros to reach."""
        self.allocation, self.is_allocation_given = allocation or "uniform", allocation is not None
        self.keep_dense, self.include = as_names(keep_dense, "keep_dense"), as_names(include, "include")
        self.pattern = parse_pattern(pattern)
        self.seed, self.storage, self.lr_scaling = as_seed(seed), storage, parse_lr_scaling(lr_scaling)
        check_share(lr_ramp=lr_ramp)
        self.lr_ramp = as_float(lr_ramp)
        if weights is None:
            check_model(model, storage=storage)
            weights = prunable_weights(model, keep_dense=self.keep_dense, include=self.include)
        self.weights: tuple[Weight, ...] = tuple(weights)
        """The weights that may be pruned."""
        for weight in self.weights:
            self.pattern.check(weight, self.target_sparsity)
        self.cost_power = parse_cost_power(cost_power, self.allocation)
        factors = cost_factors(model, example, self.weights, self.cost_power) if self.cost_power else {}
        parameters = dict.fromkeys(weight.parameter for weight in self.weights)
        before = {id(other): other for name in parameters if (other := _owner(model.get_parameter(name))) is not None}
        for name, parameter in model.named_parameters():
            if parameter in OWNERS and (other := _owner(parameter)) is not None and id(other) not in before:
                raise GrowpruneError(
                    f"{name} belongs to another SparseModel, whose zeros would no longer be kept: create one for all "
                    f"weights, or call the other's to_dense_() first"
                )
        for message in unpruned(model, self.weights, self.keep_dense) if sparsity > 0 else ():
            warn(message)
        self.stored: dict[str, SparseParameter] = store(model, parameters, storage, self.pattern)
        """How the prunable parameters are stored, by name."""
        for other in before.values():
            other._let_go("another SparseModel was created from the same weights: use that one")
        self.whole = Part("all", tuple(self.stored))
        self.gradients = Gradients(self.stored)
        self.editor = Editor(self, rescale=rescale, cost_factors=factors)
        self.steppers: weakref.WeakSet[Stepper] = weakref.WeakSet()
        self.cursor: Cursor | None = None
        """The plan that is being carried out, if any."""
        self.rule: RunningRule | None = None
        self.ranks: Any = None
        """The processes that share the weights, if the model is sharded."""
        self.num_mask_changes = 0
        """A counter that changes whenever masks may have changed: by edits, by a rule, or by a loaded state."""
        self._densities: dict[str, float] | None = None
        self._waiting: weakref.ref[Cursor] | None = None
        self._has_stepped = False
        self._has_warned = False
        self._is_replicated = False
        """True if several processes train replicas of the model, whose masks must be the same."""
        self._compared: tuple[int, int] | None = None
        """How many edits and rewirings there had been when the masks of replicas were compared."""
        self._replaced: list[weakref.ref[Tensor]] = []
        """Parameters that edits have replaced since the last step, and DistributedDataParallel may hold."""
        self._gone = ""
        """Why the SparseModel no longer belongs to the model."""
        self._handles: list[Any] = []
        self._own()
        self.notice_shards()

    @classmethod
    def from_zeros(
        cls,
        model: nn.Module,
        *,
        sparsity: float | None = None,
        allocation: str = "global",
        **settings: Any,
    ) -> SparseModel:
        """Create a SparseModel from a model that is already sparse, such as a pruned checkpoint; its zeros stay pruned.

        Args:
            sparsity: the target fraction of zeros; by default the fraction that the model has.
            settings: further arguments of `SparseModel`.

        A dense model is an error. Live weights that happen to be zero count as pruned.

        Examples:
            >>> layer = nn.Linear(4, 2)
            >>> _ = layer.weight.data[:, 1:].zero_()
            >>> SparseModel.from_zeros(layer).num_alive
            2
        """
        settings |= {name: as_names(settings.get(name, ()), name) for name in ("keep_dense", "include")}
        pattern = parse_pattern(settings.get("pattern", "unstructured"))
        check_model(model)
        weights = prunable_weights(model, keep_dense=settings["keep_dense"], include=settings["include"])
        masks = masks_of_zeros(model.get_parameter, weights, pattern)
        found = check_sparse(weights, masks, pattern)
        sparse = cls(model, found if sparsity is None else sparsity, allocation=allocation, **settings)
        for name, mask in masks.items():
            sparse.stored[name].set_mask(mask)
        return sparse

    @property
    def sparsity(self) -> float:
        """The fraction of the prunable weights that are zero now."""
        return 1 - self.num_alive / self.num_prunable if self.num_prunable else 0.0

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
        self.apply(prune(part or self.whole, to=to, share=share, by=by))

    def grow(
        self,
        part: Part | None = None,
        *,
        to: float | None = None,
        share: float | None = None,
        by: By | Score = By.RANDOM,
    ) -> None:
        """Make more weights of a part (by default the whole model) live, by default all, starting at exactly zero."""
        self.apply(grow(part or self.whole, to=to, share=share, by=by))

    def apply(self, *edits: Edit) -> None:
        """Apply edits in order; the state of optimizers follows."""
        self.restore_groups()
        self.notice_shards()
        self.check(*[edit.part for edit in edits])
        if empty := [name for name, p in self.model.named_parameters() if p.is_meta and name in self.stored]:
            raise GrowpruneError(f"{empty[0]} is on the meta device and has no values: load the model first")
        self.enforce()  # someone may have written to dead weights, and what grows must start from zero
        for edit in edits:
            self.editor.apply(edit)
        if any([edit.by.needs_gradients for edit in edits]):
            self.gradients.clear()

    def score(self, by: By, losses: Sequence[Callable[[], Tensor]]) -> None:
        """Compute gradients before training, so that the next edit can choose by them.

        Args:
            losses: functions that each compute a loss; GraSP calls them twice.
        """
        by = parse_choice(By, by)
        self.check_by(by)
        if callable(losses) or not losses:
            given = repr(losses) if callable(losses) else "an empty list"
            raise GrowpruneError(f"losses must be a list of functions that each compute a loss, got {given}")
        self.notice_shards()
        self.gradients.observe(by, self.model, losses)

    # Training

    def shard(self, mesh: DeviceMesh, *, units: Sequence[str] | None = None, **settings: Any) -> nn.Module:
        """Shard the model over the ranks of a mesh with torch's FSDP2. Create optimizers after it.

        It needs compact storage. Every rank then holds a share of the live values, and sends only live values. You may
        call `fully_shard` yourself instead, inner modules first. Returns the model.

        Args:
            units: names or globs of the modules that are gathered one at a time; by default the blocks in the model's
                lists (ModuleList, Sequential). All other parameters are gathered with the model.
            settings: further arguments of `torch.distributed.fsdp.fully_shard`, such as mp_policy.
        """
        self.check_not_released()
        from growprune import sharding  # FSDP2 takes a second to load

        sharding.shard(self, mesh, units=units, **settings)
        return self.model

    def attach(self, optimizer: Optimizer) -> Optimizer:
        """Keep pruned weights exactly zero under this optimizer: gradients, weights and optimizer state.

        An optimizer that is not attached is attached at its first step. Attach it yourself if the model is edited
        before that, or if its state is loaded with compact storage. Attaching does not advance a plan: call
        `Cursor.attach` for that instead. It works with any optimizer: state with the shape of its parameter is masked,
        other state is left alone. Returns the optimizer, so that you can create and attach it in one line.
        """
        self.check_not_released()
        self.notice_shards()
        inner = unwrapped(optimizer)
        check_optimizer(inner)
        parameters = [p for group in inner.param_groups for p in group["params"]]
        if {id(parameter) for parameter in self.model.parameters()}.isdisjoint(map(id, parameters)):
            raise GrowpruneError("the optimizer has no parameter of the model: create it with model.parameters()")
        if None in [OWNERS.get(parameter, self) for parameter in parameters]:
            raise GrowpruneError(STALE)
        if isinstance(inner, torch.optim.Muon) and self.storage == "compact" and self.trained_by(inner):
            raise GrowpruneError("Muon cannot train weights in compact storage (not 2-D): use storage='masked'")
        check_rates(self.lr_scaling, inner)
        self._own_parameters()
        stepper = stepper_of(inner)
        stepper.add(self)
        self.steppers.add(stepper)
        self.enforce()
        return optimizer

    def enforce(self) -> None:
        """Set pruned weights, and their state in the optimizers that train them, to exactly zero."""
        self.mask_weights(self.stored, self.optimizers())

    def mask_copy(self, copy: nn.Module) -> None:
        """Apply the masks to a copy of the model, such as a moving average or a deepcopy.

        Do this before you use or save a moving average: averaged across an edit, it has the weights of both masks. The
        copy may be wrapped, as by AveragedModel. A compact copy keeps the mask that it was copied with; copy the model
        again after an edit.
        """
        inner, dense = _named_alike(copy, self.stored), []
        for name, own in self.stored.items():  # all, before any is changed
            path, _, local = name.rpartition(".")
            layout = layouts_of(module := inner.get_submodule(path)).get(local)
            shape = module.get_parameter(local).shape if layout is None else layout.shape
            if shape != own.shape:
                raise GrowpruneError(
                    f"{name} has shape {tuple(shape)} in the copy, but {tuple(own.shape)} in the model: pass a copy of "
                    f"the same model"
                )
            if layout is None:
                dense.append((module, local, own))
            elif not torch.equal(layout.mask().cpu(), own.mask().cpu()):
                raise GrowpruneError(f"{name} of the copy is compact and has another mask: copy the model after edits")
        with torch.no_grad():
            for module, local, own in dense:
                target = module.get_parameter(local)
                mask = own.mask().to(target.device)
                target.copy_(torch.where(mask, target, 0))
                if (stored := stored_in(module).get(local)) is not None:
                    stored.set_mask(mask)  # so that it trains what lives now

    def to_dense_(self) -> nn.Module:
        """Turn the model back into a plain module with zeros, for pickling, tracing and export. Returns the model.

        Masks can still be read and saved. Edits and steps of the optimizers that trained the sparse model raise an
        error from now on. You can create a new SparseModel from the model.
        """
        self.check_not_released()
        if self.ranks is not None:
            raise GrowpruneError("a sharded model cannot be made dense on one rank: save it and load it into a new one")
        self.check_zeros()
        self._let_go(
            "the model was made dense by to_dense_(): create a new SparseModel from it",
            step="the model was made dense by to_dense_(): create a new optimizer",
        )
        make_plain(self.model, self.stored, self.pattern)
        self.storage = "masked"
        return self.model

    def __repr__(self) -> str:
        density = f"sparsity {self.sparsity:.4g} of target {self.target_sparsity:.4g}"
        what = f"{self.num_prunable:,} prunable weights, storage={self.storage!r}"
        return f"SparseModel({type(self.model).__name__}, {density}, {what}{self.wrong_weights()})"

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseModel:
        """Return an independent copy of the model and its masks, with no optimizer, plan, rule or replicas."""
        memo[id(self)] = clone = object.__new__(type(self))
        memo |= {id(one): None for one in (self.rule, self.cursor, self.gradients.add_up) if one is not None}
        fresh: dict[str, Any] = dict(steppers=weakref.WeakSet(), _handles=[], _waiting=None, _is_replicated=False)
        state = {name: value for name, value in vars(self).items() if name not in fresh}
        vars(clone).update(copy.deepcopy(state, memo) | fresh)
        if not clone._gone:
            clone._own()
        return clone

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to pickle, which would lose the optimizers silently."""
        raise GrowpruneError(
            "a SparseModel cannot be pickled: save its state_dict() and that of its model, or write a file with "
            "growprune.save(sparse, path)"
        )

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, and the gradients that the next edit needs.

        Together with the states of the model, of the optimizer and of the Cursor, an exact resume needs nothing else.
        """
        return {
            "masks": self.packed_masks(),
            "num_edits": self.editor.num_edits,
            "gradients": self.gradients.state_dict(),
            "settings": self.decisive,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state. Load the model's own state after it, because weights must agree with the masks.

        A state with another seed, allocation or pattern is an error.
        """
        self.check_not_released()
        self.restore_groups()
        self.notice_shards()
        check_state(state, "masks", "num_edits", "gradients", "settings")
        check_settings(state["settings"], self.decisive, "SparseModel")
        self.check_packed_masks(state["masks"])
        for name, stored in self.stored.items():
            mask = unpack(state["masks"][name], stored.shape, stored.parameter.device)
            if not torch.equal(mask, stored.mask()):
                for stepper in self.steppers:
                    if stepper.loaded:
                        stepper.loaded = "state, then masks"
            with self.following(name):
                stored.set_mask(mask)
        self.resume(state)
        self.enforce()

    def adopt_zeros(self, state: Mapping[str, Tensor] | None = None) -> None:
        """Take the zeros of weights as the masks: those of a `state_dict`, which is loaded, or of the present weights.

        Use it for weights whose masks you did not save, such as the best weights of a training. Live weights that
        happen to be zero count as pruned; dense weights are an error. For an exact resume, load the state of the
        Sparsifier instead.
        """
        self.check_not_released()
        if self.ranks is not None:
            raise GrowpruneError("adopt_zeros does not work with a sharded model: call it before sparse.shard")
        if state is not None:  # all is checked before anything is changed
            mine = self.model.state_dict()
            if unlike := sorted(mine.keys() ^ state.keys()):
                raise GrowpruneError(f"only one of the state dict and the model has {unlike[0]}: pass this model's")
            for name, tensor in mine.items():
                given, shape = (getattr(one, "shape", None) for one in (state[name], tensor))
                if given != shape:
                    raise GrowpruneError(f"{name} has shape {given} in the state dict, but {shape} here")
        self.restore_groups()

        def values(name: str) -> Tensor:
            return self.stored[name].weight() if state is None else state[name]

        masks = masks_of_zeros(values, self.weights, self.pattern)
        check_sparse(self.weights, masks, self.pattern)  # a dense model is an error, as in `from_zeros`
        for name, mask in masks.items():
            with self.following(name) as stored:
                stored.set_mask(mask.to(stored.parameter.device))
        if state is not None:
            self.model.load_state_dict(state)

    @property
    def masks(self) -> dict[str, Tensor]:
        """Copies of the masks of all prunable parameters, by name: bool tensors, True where a weight is live."""
        return Masks({name: stored.mask().clone() for name, stored in self.stored.items()})

    @property
    def num_alive(self) -> int:
        """The number of live prunable weights."""
        return sum(self.alive_by_weight().values())

    @property
    def num_prunable(self) -> int:
        """The number of prunable weights, live or pruned."""
        return sum(weight.numel for weight in self.weights)

    @property
    def is_at_target(self) -> bool:
        """True if the model is at its target sparsity."""
        return self.editor.is_done(self._to_target())

    def summary(self, example: Any = None) -> Summary:
        """Count the live weights per layer and in total, and FLOPs if given an example input. Print it for a table."""
        self.check()
        self.check_zeros()
        return summarise(self, example)

    # For the other packages of growprune. They call these methods, and write to none of the attributes.

    def resume(self, state: Mapping[str, Any]) -> None:
        """Load what a state has besides masks."""
        self.editor.num_edits = state["num_edits"]
        self.gradients.load_state_dict(state["gradients"])

    def notice_shards(self) -> None:
        """Find out what FSDP2 has sharded since the last call. All ranks of a sharded model must call this together."""
        parameters = [(name, s.module._parameters.get(name.rpartition(".")[2])) for name, s in self.stored.items()]
        check_parameters(parameters)
        if self.ranks is not None or is_fsdp2(self.model.modules()):
            from growprune import sharding  # FSDP2 takes a second to load

            if (found := sharding.newly_sharded(self)) is not None:
                stored, self.ranks = found
                self.stored.update(stored)
                self.gradients.shares = self.ranks

    def check(self, *parts: Part) -> None:
        """Raise if layers of the model were replaced, or if it lacks tensors that a part names."""
        if parts:
            self.check_not_released()
        own = {id(parameter) for parameter in self.model.parameters()}
        for name, stored in self.stored.items():
            if id(stored.module._parameters.get(name.rpartition(".")[2])) not in own:
                raise GrowpruneError(
                    f"{name} was replaced after the SparseModel was created: create a new SparseModel after changing "
                    f"layers"
                )
        known = named_tensors(self.model) if parts else {}
        for part in parts:
            if not isinstance(part, Part):
                raise GrowpruneError(f"part must be a Part of a Partition of the model, got {part!r}")
            if foreign := [name for name in part.tensors if name not in known]:
                raise GrowpruneError(
                    f"part {part.name} has {foreign[0]!r}, but the model has names like {next(iter(known))!r}: create "
                    f"the partition and the SparseModel from the same model"
                )

    def check_by(self, by: By) -> None:
        """Raise if this storage does not support a criterion."""
        if by in (By.MOMENTUM, By.GRASP) and self.storage == "compact":
            raise GrowpruneError(f"by={by.value} needs dense tensors of all weights: use storage='masked'")

    def check_not_released(self) -> None:
        if self._gone:
            raise GrowpruneError(self._gone)

    def revived(self) -> dict[str, int]:
        """Return the number of pruned weights that are not zero, by parameter; only parameters that have any."""
        if self.storage != "masked":
            return {}  # compact storage does not have them
        found = [(name, stored) for name, stored in self.stored.items() if not stored.is_known_full]
        counts = [torch.count_nonzero(s.parameter.detach().masked_fill(s.mask(), 0)) for _, s in found]
        return {name: count for (name, _), count in zip(found, in_one_go(counts), strict=True) if count}

    def wrong_weights(self) -> str:
        """Say in a few words if pruned weights are not zero, for a repr."""
        wrong = sum(self.revived().values())
        return f", but {wrong:,} pruned weights are not zero" if wrong else ""

    def check_zeros(self) -> None:
        """Raise if pruned weights are not zero: the weights then belong to other masks."""
        if wrong := self.revived():
            raise GrowpruneError(
                f"the weights disagree with the masks: {_listed(wrong)} non-zero where the mask prunes. Take their "
                f"zeros as the masks with sparse.adopt_zeros(), set them to zero with sparse.enforce(), or load the "
                f"state that belongs to the masks with sparsifier.load_state_dict"
            )

    # Optimizers

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that are attached and still exist."""
        return [optimizer for stepper in self.steppers if (optimizer := stepper.optimizer()) is not None]

    def trained_by(self, optimizer: torch.optim.Optimizer) -> dict[str, SparseParameter]:
        """Return how the prunable parameters that an optimizer trains are stored, by name."""
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return {name: stored for name, stored in self.stored.items() if id(stored.parameter) in ids}

    def take_in(self, optimizer: torch.optim.Optimizer) -> None:
        """Attach an optimizer that makes its first step, if it is not attached yet."""
        if stepper_of(optimizer) in self.steppers:
            return
        self.attach(optimizer)
        if self.cursor is not None and not self.cursor.is_over and self.cursor.is_clocked:
            warn(
                f"a {type(optimizer).__name__} that growprune was not given trains the model. It keeps pruned weights "
                f"at zero, but its steps do not advance the plan (iteration {self.cursor.iteration} of "
                f"{self.cursor.num_iterations}): to let them, call sparsifier.cursor.attach(optimizer)"
            )

    def check_ready(self, stepper: Stepper) -> None:
        """Raise before a step if it would go wrong: the plan has not begun, or something does not fit together."""
        optimizer = stepper.optimizer()
        if self.waiting is not None and optimizer is not None:
            if not any(group.get("lr", 1) for group in optimizer.param_groups):
                return  # torch's distributed checkpoint makes such a step to have state that it can load into
            raise GrowpruneError(
                "the optimizer steps, but the plan has not begun: call cursor.attach(optimizer), or call "
                "cursor.advance(0) before the first step and cursor.advance(iteration) after each"
            )
        self._waiting = None
        if self.storage == "compact" and stepper.loaded == "state, then masks":
            raise GrowpruneError(
                "the optimizer's state was loaded before the SparseModel's, whose masks say which weights it belongs "
                "to: load the SparseModel's state first, then the optimizer's"
            )
        self._check_wrapped_again()
        changes = self.editor.num_edits, 0 if self.rule is None else self.rule.num_rewirings
        if self._is_replicated and self._compared != changes:
            masks = [mask.cpu().numpy().tobytes() for mask in self.packed_masks().values()]
            if first_to_differ(masks, next(iter(self.stored.values())).parameter.device):
                raise GrowpruneError(
                    f"the {distributed.get_world_size()} processes have different masks (at edit "
                    f"{self.editor.num_edits}): start them with the same weights and the same seed, and average "
                    f"gradients in every step"
                )
            self._compared = changes
        has_stepped, self._has_stepped = self._has_stepped, True
        if has_stepped or self.editor.num_edits or self.storage != "masked" or self.rule is not None:
            return  # a rule may keep zeros among live weights
        zeros = already_sparse(self.model, self.weights)  # is a pruned model to be trained with all weights live?
        if zeros is not None and all(stored.mask().all() for stored in self.stored.values()):
            warn(
                f"{zeros:.4g} of the model's weights are zero, and training will make them non-zero: to keep them "
                f"pruned, use a method with initial_mask, such as gradual_gap, or SparseModel.from_zeros(model)"
            )

    def _check_wrapped_again(self) -> None:
        """Raise if a DistributedDataParallel from before an edit lacks the new weights."""
        if not self._replaced:
            return
        is_distributed = distributed.is_available() and distributed.is_initialized()
        if is_distributed:
            gc.collect()
        references = self._replaced if is_distributed else []
        old = {id(parameter) for reference in references if (parameter := reference()) is not None}
        wrappers = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)] if old else []
        wrapped = [id(parameter) for wrapper in wrappers for parameter in wrapper._module_parameters]
        new = {id(stored.parameter) for stored in self.stored.values()}
        if old & set(wrapped) and not new <= set(wrapped):
            raise GrowpruneError("an edit replaced weights that DistributedDataParallel holds: wrap the model again")
        self._replaced = []

    def mask_weights(
        self,
        trained: Mapping[str, SparseParameter],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        only_state: bool = False,
    ) -> None:
        """Set pruned weights to exactly zero, and the state with the shape of its parameter in some optimizers."""
        if self.storage != "masked":
            return  # dead weights are not stored
        pairs: list[tuple[SparseParameter, list[Tensor]]] = []
        for stored in trained.values():
            parameter = stored.parameter
            state = _state_like(parameter, optimizers) if optimizers else []
            pairs.append((stored, state if only_state else [parameter, *state]))
        Masked.enforce(pairs)

    @contextmanager
    def following(self, name: str) -> Iterator[SparseParameter]:
        """Keep the optimizer state of live weights while the mask of a parameter changes."""
        self.num_mask_changes += 1
        self._densities = None
        stored, optimizers = self.stored[name], self.optimizers()
        old = stored.parameter
        if self.storage == "masked":
            yield stored
            Masked.enforce([(stored, _state_like(old, optimizers))])  # the weight itself is zero already
            return
        holding = [optimizer for optimizer in optimizers if old in optimizer.state]
        dense = {o: _reshaped(o.state[old], old.shape, stored.to_dense) for o in holding}
        yield stored
        new = stored.parameter
        OWNERS[old], OWNERS[new] = None, weakref.ref(self)
        if not hasattr(new, "device_mesh"):  # FSDP2 knows the new one; DistributedDataParallel would hold the old one
            self._replaced.append(weakref.ref(old))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [new if p is old else p for p in group["params"]]
            if optimizer not in dense:
                continue
            state = [t for t in optimizer.state.pop(old).values() if isinstance(t, Tensor) and t.numel() > 1]
            # Adafactor's state belongs to rows and columns, so it cannot move to another shape
            if "adafactor" not in type(optimizer).__name__.lower() and all(t.shape == old.shape for t in state):
                optimizer.state[new] = _reshaped(dense[optimizer], stored.shape, stored.from_dense)
            elif not self._has_warned:
                self._has_warned = True
                warn(
                    f"the state of {name} in {type(optimizer).__name__} does not fit the weight after an edit and was "
                    f"reset, as for every edited weight: use storage='masked' to keep it"
                )

    def live_state(self, optimizer: Any, device: torch.device | str | None = None) -> dict[str, Any]:
        """Return the state of an optimizer with the entries of live weights only.

        Quantized state is kept whole, because converting it back would round it again.

        Args:
            device: the device of state with the shape of a parameter; by default it stays where it is.
        """

        def take(one: SparseParameter | None, parameter: Tensor, entry: Tensor) -> Tensor:
            if entry.shape != parameter.shape:
                return entry
            if one is None:
                entry = whole(entry)
            elif not is_wrapped(entry):
                entry = one.to_live(entry)
            return entry if device is None else entry.to(device)

        inner = unwrapped(optimizer)
        return _converted(self.stored, inner, inner.state_dict(), take)

    def load_live_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Load what `live_state` returned, from any storage."""

        def put(one: SparseParameter | None, parameter: Tensor, entry: Tensor) -> Tensor:
            if one is None:
                return like(parameter, entry) if entry.shape == parameter.shape else entry
            if is_wrapped(entry):
                if entry.shape == parameter.shape:
                    return entry
                if entry.shape == one.shape:  # of masked storage, but this is compact
                    return one.from_dense(plain(entry).to(parameter.device))
            return one.from_live(plain(entry)) if entry.shape == (one.num_alive(),) else entry

        inner = unwrapped(optimizer)
        inner.load_state_dict(_converted(self.stored, inner, state, put))

    def densities(self) -> dict[str, float]:
        """Return the density of each prunable parameter, by name."""
        if self._densities is None:
            self._densities = {name: s.num_alive() / s.shape.numel() for name, s in self.stored.items()}
        return self._densities

    def aim(self, sparsity: float, lr_scaling: Exponent) -> None:
        """Train to another sparsity from now on, and scale learning rates with another exponent."""
        for optimizer in self.optimizers():
            check_rates(lr_scaling, optimizer)
        self.target_sparsity, self.lr_scaling = sparsity, lr_scaling

    # Plans

    def wait_for(self, cursor: Cursor) -> None:
        """Refuse steps until the plan of a cursor has begun."""
        self._waiting = weakref.ref(cursor)

    @property
    def waiting(self) -> Cursor | None:
        """A cursor whose plan has yet to begin."""
        cursor = None if self._waiting is None else self._waiting()
        return cursor if cursor is not None and cursor.position < 0 else None

    def begin(self, cursor: Cursor | None) -> None:
        """Carry out the plan of a cursor from now on, instead of any other."""
        self.cursor, self._waiting = cursor, None

    def skip(self, num_edits: int) -> None:
        """Count edits that are applied elsewhere, so that later ones draw the same random numbers everywhere."""
        self.editor.num_edits += num_edits

    @contextmanager
    def pruned(self) -> Iterator[None]:
        """Prune the model to its target within this context. Optimizers must not step in it."""
        self.notice_shards()
        undo = self.editor.preview(self._to_target())
        try:
            yield
        finally:
            undo()

    @property
    def can_be_pruned(self) -> bool:
        """True if the model can be pruned to its target; False if it is already sparser."""
        return self.editor.is_possible(self._to_target())

    def _to_target(self) -> Edit:
        return prune(self.whole, to=self.target_sparsity)

    def watch(self, edits: Sequence[Edit]) -> None:
        """Watch the gradients of the next iterations for edits that need them; without edits, stop watching."""
        looked_at = [edit.by for edit in edits if edit.by.needs_gradients]
        by = By.MOMENTUM if By.MOMENTUM in looked_at else next(iter(looked_at), None)  # an average takes all iterations
        if by is not None:
            self.check_by(by)
        self.gradients.watch(by)

    # Processes that train replicas

    def add_up_gradients(self, add_up: Callable[[Tensor], Tensor]) -> None:
        """Sum the gradients that edits use over the replicas of the model, so that all choose the same weights."""
        self.gradients.add_up = add_up

    def train_replicas(self) -> None:
        """Make all processes choose the same weights, and compare their masks before each step after a change."""

        def summed(tensor: Tensor) -> Tensor:
            total = tensor.to_dense().contiguous().clone() if tensor.is_sparse else tensor.contiguous().clone()
            distributed.all_reduce(total)
            return total

        if is_replicated() and self.ranks is None:  # those of a sharded model are summed already
            self.add_up_gradients(summed)
            self._is_replicated = True

    # Copies

    def snapshot(self, part: Part | None = None, *, device: torch.device | str | None = None) -> Snapshot:
        """Copy the tensors and masks of a part, or of the whole model; only the live values of sparse weights.

        Args:
            device: the device of the copy; by default each tensor's own.
        """
        self.notice_shards()
        tensors = named_tensors(self.model)
        names, copied = tensors if part is None else set(part.tensors), {}
        for name, tensor in tensors.items():
            if name in names:
                to, stored = tensor.device if device is None else device, self.stored.get(name)
                values = whole(tensor.detach()) if stored is None else stored.to_live(tensor.detach())
                mask = None if stored is None else pack(stored.mask()).to(to)
                copied[name] = (values.to(to, copy=True), mask)
        return copied

    def restore(self, snapshot: Mapping[str, tuple[Tensor, Tensor | None]], *, keep: bool = False) -> None:
        """Restore copied tensors and masks, from any storage.

        Args:
            keep: let compact storage keep the given tensors of sparse weights instead of copying them.
        """
        self.check_not_released()
        self.restore_groups()
        self.notice_shards()
        self.restore_some(snapshot, keep=keep)
        if self.steppers or self.stored.keys() - snapshot.keys():
            self.enforce()  # what was loaded is zero off its mask, but the state of optimizers may not be

    def restore_some(self, snapshot: Mapping[str, tuple[Tensor, Tensor | None]], *, keep: bool = False) -> None:
        """`restore`, for a model that is being built."""
        tensors = named_tensors(self.model)
        for name, (values, mask) in snapshot.items():
            if mask is None:
                with torch.no_grad():
                    tensors[name].copy_(like(tensors[name], values))
            else:
                check_packed(mask, self.stored[name].shape)
                with self.following(name) as stored:
                    stored.load(values, mask, keep=keep)

    def packed_masks(self) -> dict[str, Tensor]:
        """Return the masks of all prunable parameters, by name, eight weights to a byte."""
        return {name: pack(stored.mask()) for name, stored in self.stored.items()}

    def check_packed_masks(self, masks: Mapping[str, Tensor]) -> None:
        """Raise, before any mask is changed, unless all fit the prunable weights."""
        if unknown := set(masks) ^ set(self.stored):
            raise GrowpruneError(
                f"the state's masks and the model's prunable weights differ in {sorted(unknown)}: use the same "
                f"keep_dense and include as when the state was saved"
            )
        for name, stored in self.stored.items():
            check_packed(masks[name], stored.shape)

    @property
    def decisive(self) -> dict[str, Any]:
        """The settings that decide which weights later edits choose. A state is loaded only if they are equal."""
        costs = {"cost_power": self.cost_power, "cost_factors": dict(self.editor.cost_factors)}
        return {"seed": self.seed, "allocation": self.allocation, "pattern": self.pattern.name, **costs}

    def alive_by_weight(self) -> dict[str, int]:
        """Return the number of live elements of each weight. Waits for the device once."""
        return self.editor.num_alive(self.weights, pattern=Unstructured())

    # Ownership

    def _own(self) -> None:
        """Let the model own this object, and have it check what is loaded into it."""
        vars(self.model)[OWNED] = _Owned(self)
        layers = {id(stored.module): stored.module for stored in self.stored.values()}
        for module in {id(self.model): self.model, **layers}.values():
            check: Any = _LoadCheck(self)
            self._handles.append(module.register_load_state_dict_pre_hook(check))  # type: ignore[no-untyped-call]
        OWNERS.num_models += 1
        self._own_parameters()
        watch_optimizers()

    def _own_parameters(self) -> None:
        for stored in self.stored.values():
            OWNERS[stored.parameter] = weakref.ref(self)
            stored.hook_gradients()

    def _let_go(self, reason: str, *, step: str = "") -> None:
        """No longer belong to the model.

        Args:
            step: why steps of the optimizers are refused from now on, if they are.
        """
        self._gone = reason
        self.watch(())
        self.rule, self.cursor, self._waiting = None, None, None
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for stepper in list(self.steppers):
            stepper.drop(self, reason=step)
        self.steppers = weakref.WeakSet()
        for stored in self.stored.values():
            if _owner(stored.parameter) is self:
                del OWNERS[stored.parameter]
            if self.storage == "masked":
                stored.release()
        if sparse_model_of(self.model) is self:
            del vars(self.model)[OWNED]

    def restore_groups(self) -> None:
        """Give optimizers whose last step raised the user's param groups again."""
        for stepper in self.steppers:
            stepper.restore_groups()


class _Owned:
    """What a model holds its SparseModel by. Copies and pickles of the model leave it behind."""

    def __init__(self, sparse: SparseModel) -> None:
        self.sparse = sparse

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class _LoadCheck:
    """Refuse a state dict whose weights disagree with the masks, before anything is loaded: a hook of modules.

    A layer that is kept does not keep the whole model. Copies and pickles of the module get a function that does
    nothing instead.
    """

    def __init__(self, sparse: SparseModel) -> None:
        self._sparse = weakref.ref(sparse)

    def __call__(
        self, module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *rest: object
    ) -> None:
        sparse = self._sparse()
        if sparse is None:
            return
        if sparse.storage == "masked" and metadata.get("assign_to_params_buffers"):
            raise GrowpruneError(
                "load_state_dict(assign=True) would replace the weights of a sparse model by others, which have no "
                "masks and which no optimizer trains: use assign=False"
            )
        wrong = {}
        for path, layer in module.named_modules():
            for local, stored in stored_in(layer).items():
                name = f"{prefix}{path}.{local}" if path else f"{prefix}{local}"
                tensor: Any = state.get(name)
                if stored.is_known_full or type(tensor) not in (Tensor, nn.Parameter) or tensor.shape != stored.shape:
                    continue
                dead = ~stored.mask().to(tensor.device)
                if count := int(torch.count_nonzero(tensor.detach()[dead])):
                    wrong[name] = count
        if wrong:
            raise GrowpruneError(
                f"the weights to load disagree with the masks of the model: {_listed(wrong)} non-zero where the mask "
                f"prunes; none of them was loaded. Resume with sparsifier.load_state_dict(sparsifier_state), which has "
                f"the masks too, or take the zeros of these weights as the masks with sparse.adopt_zeros(weights). "
                f"Load dense weights before the model is made sparse"
            )

    def __deepcopy__(self, memo: object) -> Any:
        return "".format  # a function of Python itself that takes anything and changes nothing

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return getattr, ("", "format")


def _state_like(parameter: Tensor, optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """Return the state of a parameter that has its shape; not codes of quantized state, whose 0 need not be a zero."""
    return [
        entry
        for optimizer in optimizers
        for entry in optimizer.state.get(parameter, {}).values()
        if isinstance(entry, Tensor) and entry.shape == parameter.shape and entry.is_floating_point()
    ]


def _converted(
    stored: Mapping[str, SparseParameter],
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    convert: Callable[[SparseParameter | None, Tensor, Tensor], Tensor],
) -> dict[str, Any]:
    """Convert the tensors of a state, given how their parameter is stored (if sparse), and the parameter."""
    of_id = {id(one.parameter): one for one in stored.values()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    converted = {}
    for index, entries in state["state"].items():
        parameter = parameters[index]
        one = of_id.get(id(parameter))
        converted[index] = {
            name: convert(one, parameter, entry) if isinstance(entry, Tensor) else entry
            for name, entry in entries.items()
        }
    return {**state, "state": converted}


def _reshaped(entries: dict[str, Any], shape: Sequence[int], convert: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Convert those tensors of a parameter's state that have a given shape. Quantized ones become plain."""
    return {
        name: convert(entry if type(entry) is Tensor else plain(entry))
        if isinstance(entry, Tensor) and entry.shape == torch.Size(shape)
        else entry
        for name, entry in entries.items()
    }


def _owner(parameter: Tensor) -> SparseModel | None:
    return reference() if (reference := OWNERS.get(parameter)) is not None else None


def _listed(wrong: Mapping[str, int]) -> str:
    return f"{sum(wrong.values()):,} weights of {few(wrong)} are"


def check_sparse_model(given: object, who: str) -> None:
    """Raise if the argument is not a SparseModel, such as the model itself."""
    if not isinstance(given, SparseModel):
        has_one = isinstance(getattr(given, "sparse", None), SparseModel)
        remedy = "give its attribute .sparse" if has_one else "create one with SparseModel(model, sparsity=0.9)"
        raise GrowpruneError(f"{who} needs a SparseModel, got a {type(given).__name__}: {remedy}")


def _named_alike(copy: nn.Module, parameters: Mapping[str, SparseParameter]) -> nn.Module:
    """Unwrap a copy until its parameters have the same names as in the model."""
    for inner in (copy, getattr(copy, "module", None), getattr(copy, "_orig_mod", None)):
        if isinstance(inner, nn.Module) and parameters.keys() <= dict(inner.named_parameters()).keys():
            return inner
    missing = next(name for name in parameters if name not in dict(copy.named_parameters()))
    raise GrowpruneError(f"the copy has no parameter {missing}: pass a copy of the same model")


# Checks


def is_fsdp2(modules: Iterable[Any]) -> bool:
    """True if `fully_shard` was called on any of the modules. It changes their class."""
    return any([hasattr(kind, "set_reshard_after_backward") for kind in {type(module) for module in modules}])


def check_model(model: nn.Module, *, storage: str | None = None) -> None:
    """Raise if a model cannot be made sparse, is already wrapped, or is sharded in an unsupported way.

    Args:
        storage: how weights will be stored, if FSDP2 may have sharded some already.
    """
    if not isinstance(model, nn.Module):
        raise GrowpruneError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
    sharded: Collection[str] = ()
    if storage is not None and is_fsdp2(model.modules()):
        from growprune import sharding  # FSDP2 takes a second to load

        sharded = sharding.sharded_names(model, storage)
    homes = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    if "torch.distributed.fsdp.fully_sharded_data_parallel" in homes:
        raise GrowpruneError(f"FSDP1 (FullyShardedDataParallel) flattens weights and loses sparse ones: {INSTEAD}")
    if "deepspeed" in {home.split(".")[0] for home in homes}:
        raise GrowpruneError(f"DeepSpeed cannot train a sparse model: {INSTEAD}")
    if compact := [path for path, module in model.named_modules() if vars(module).get(LAYOUTS)]:
        raise GrowpruneError(
            f"{compact[0] or 'the model'} already belongs to another SparseModel (storage='compact'): call its "
            f"to_dense_() first, or use a new model"
        )
    check_parameters(model.named_parameters())
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh") and name not in sharded:
            raise GrowpruneError(
                f"{name} is already sharded (it is a DTensor): create the SparseModel from the plain model, then shard "
                f"it"
            )
        if is_lazy(parameter):
            raise GrowpruneError(f"{name} has no shape yet: run a batch through the model first")


def check_parameters(parameters: Iterable[tuple[str, Any]]) -> None:
    """Raise if FSDP1 or DeepSpeed has taken over a parameter."""
    for name, parameter in parameters:
        if getattr(parameter, "_fsdp_flattened", False):
            raise GrowpruneError(f"{name} was flattened by FSDP1 (FullyShardedDataParallel): {INSTEAD}")
        if hasattr(parameter, "ds_id"):
            raise GrowpruneError(f"{name} belongs to DeepSpeed's ZeRO, which cannot train a sparse model: {INSTEAD}")


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers of a model, as they are stored."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def check_settings(saved: Mapping[str, object], mine: Mapping[str, object], who: str) -> None:
    """Raise if a state was saved with other settings, because later edits would then differ. Any storage is allowed.

    Args:
        saved: the settings in the state.
        who: the class that loads it, for the error.
    """
    check_state(saved, *mine)
    if differing := [name for name, value in mine.items() if saved[name] != value and name != "storage"]:
        its, own = (
            ", ".join(f"{name}={shorten(repr(given[name]), MAX_VALUE)}" for name in differing)
            for given in (saved, mine)
        )
        raise GrowpruneError(
            f"the state was saved with {its}, but this {who} has {own}: resume with {its}, or load only weights and "
            f"masks, with growprune.save and growprune.load"
        )
