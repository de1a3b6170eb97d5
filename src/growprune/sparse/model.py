"""SparseModel: the one mutable place where sparsity lives.

It applies edits to a model's weights, sees to it that what is pruned stays exactly zero while an optimizer trains, and
counts the live weights. Where it stands in a plan is a Cursor's to know (cursor.py). How its parameters are stored is
in storing.py, what it refuses in checks.py, what is copied of it and put back in state.py.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError, warn
from growprune.masks.allocation import Scope, parse_scope
from growprune.masks.bits import Snapshot
from growprune.masks.layers import Weight, prunable_weights
from growprune.masks.patterns import Pattern, in_one_go, parse_pattern
from growprune.masks.zeros import check_sparse, masks_of_zeros
from growprune.plan import Action, By, Edit, Part, Phase, Plan, Stage, parse_by, prune
from growprune.plan.settings import as_float, as_names, as_seed, check_sparsity, check_state
from growprune.sparse.checks import (
    check_model,
    check_module,
    check_not_taken,
    check_parts,
    check_same_layers,
    check_settings,
    sharded_in,
)
from growprune.sparse.copies import mask_copy
from growprune.sparse.editor import Editor
from growprune.sparse.gradients import Gradients
from growprune.sparse.optimizers import Optimizers, unwrapped
from growprune.sparse.sharded import sharding
from growprune.sparse.snapshot import packed_masks, put_back, set_packed_masks, take_snapshot
from growprune.sparse.step_hooks import RunningRule, hook_steps
from growprune.sparse.summary import Summary, summarise
from growprune.sparse.unpruned import unpruned
from growprune.sparse.wrapped import check_optimizer, is_fsdp2
from growprune.storage import SparseParameter
from growprune.storage.wrapping import make_plain, store

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from growprune.sparse.cursor import Cursor

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


class SparseModel:
    """A model whose weights can be pruned and grown.

    Args:
        model: any module. It is not rewritten: names, forward pass and `state_dict` stay as they are. With compact
            storage, it may be sharded by FSDP2 already.
        sparsity: the fraction of zeros aimed at, which `prune` goes to by default and `summary` compares with.
        allocation: how sparsity is shared among layers: "uniform", "global" or "erk".
        pattern: which positions may live: "unstructured", a block such as "1x8", or N:M such as "2:4".
        scope: what a global ranking covers when one part is pruned: the whole "model", or the "part".
        keep_dense: names or globs of modules or parameters that are never pruned.
        include: names or globs of parameters to prune that are not the weight of a known kind of layer; they are read
            as (out, in, ...).
        seed: decides every random mask.
        storage: how sparse weights are stored: "masked" (dense, with a mask) or "compact" (live values only).

    Everything is alive at first; the edits of a plan, or `prune`, make it sparse.

    Examples:
        >>> sparse = SparseModel(nn.Linear(10, 100), sparsity=0.9)
        >>> sparse.prune()
        >>> sparse.num_alive
        100
    """

    ranks: Any = None
    """The processes that share the weights, if the model is sharded."""
    shards_masks: bool = False
    """Whether they share the masks too."""
    rule: RunningRule | None = None
    """What happens around each step of an attached optimizer."""
    advancing: weakref.ref[Cursor] | None = None
    """The cursor that the steps of attached optimizers advance."""
    _cursor: Cursor | None = None
    _place: Mapping[str, Any] | None = None
    _is_released = False

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
    ) -> None:
        check_sparsity(sparsity)
        check_module(model)
        check_model(model, sharded=sharded_in(model, storage))
        self.model = model
        self.sparsity = sparsity = as_float(sparsity)
        self.allocation = allocation
        self.pattern = parse_pattern(pattern)
        self.scope = parse_scope(scope)
        self.seed = as_seed(seed)
        self.storage = storage
        self.keep_dense, self.include = as_names(keep_dense, "keep_dense"), as_names(include, "include")
        self.weights = prunable_weights(model, keep_dense=self.keep_dense, include=self.include)
        for weight in self.weights:
            self.pattern.check(weight, sparsity)
        names = dict.fromkeys(weight.parameter for weight in self.weights)
        self._parameters = store(model, names, storage, self.pattern)
        self._optimizers = Optimizers(self._parameters, storage)
        self.gradients = Gradients(self._parameters)
        self.editor = self._make_editor()
        """What carries out edits: which weights a part has, how many of them an edit leaves alive, and which."""
        if is_fsdp2(model.modules()):
            self.notice_shards()
        for message in unpruned(model, self.weights, self.keep_dense) if sparsity > 0 else ():
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
        """A model that is sparse already, such as a checkpoint that was pruned: its zeros are dead, and all else lives.

        Args:
            sparsity: the fraction of zeros aimed at; what the model has, if not given.
            settings: further arguments of `SparseModel`; those named here are the same as there.

        A dense model is refused. Of a live weight that happens to be zero nothing can be known: it is dead.

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
            sparse._parameters[name].set_mask(mask)
        return sparse

    def _make_editor(self) -> Editor:
        return Editor(
            self.weights,
            self._parameters,
            self._optimizers,
            self.gradients,
            pattern=self.pattern,
            allocation=self.allocation,
            scope=self.scope,
            seed=self.seed,
        )

    # Edits

    def prune(
        self, part: Part | None = None, *, to: float | None = None, share: float | None = None, by: By = By.MAGNITUDE
    ) -> None:
        """Keep the best weights of a part (the whole model by default) and make the others exactly zero."""
        to = self.sparsity if to is None and share is None else to
        self.apply(Edit(Action.PRUNE, part or self._all(), by, to, share))

    def grow(
        self, part: Part | None = None, *, to: float | None = None, share: float | None = None, by: By = By.RANDOM
    ) -> None:
        """Let more weights of a part (the whole model by default) live, all by default, each from exactly zero."""
        self.apply(Edit(Action.GROW, part or self._all(), by, 0.0 if to is None and share is None else to, share))

    def apply(self, *edits: Edit) -> None:
        """Apply edits in order; optimizer state of attached optimizers follows."""
        self.notice_shards()
        self.check(*(edit.part for edit in edits))
        self.enforce()  # someone may have written into dead weights, and what grows must start from zero
        for edit in edits:
            self.editor.apply(edit)
            self.editor.num_edits += 1
        if any(edit.by.needs_gradients for edit in edits):
            self.gradients.clear()

    def score(self, by: By, losses: Sequence[Callable[[], Tensor]]) -> None:
        """Look at gradients before there was any training, so that the next edit can choose by them.

        Args:
            losses: functions that compute a loss each; GraSP calls them twice.
        """
        by = by if isinstance(by, By) else parse_by(by)
        self.check_by(by)
        if callable(losses) or not losses:
            given = repr(losses) if callable(losses) else "empty"
            raise GrowpruneError(f"losses is {given}, but must be a list of functions that compute a loss each")
        self.notice_shards()
        for parameter in self._parameters.values():  # there may be no optimizer yet
            parameter.hook_gradients()
        self.gradients.observe(by, self.model, losses)

    def check_by(self, by: By) -> None:
        """Raise if this storage has not what an edit would look at."""
        if by in (By.MOMENTUM, By.GRASP) and self.storage == "compact":
            raise GrowpruneError(f"by is {by.value}, which needs dense tensors of all weights: use storage='masked'")

    @contextmanager
    def pruned(self) -> Iterator[None]:
        """While it lasts, the model is what it would be if it were pruned now. Optimizers must not step meanwhile."""
        self.notice_shards()
        undo = self.editor.preview(prune(self._all(), to=self.sparsity))
        try:
            yield
        finally:
            for step in reversed(undo):
                step()

    @property
    def can_be_pruned(self) -> bool:
        """Whether `prune()` can reach its count: not if the model is sparser already."""
        return self.editor.is_possible(prune(self._all(), to=self.sparsity))

    @property
    def is_at_target(self) -> bool:
        """Whether just so many weights live as `prune()` leaves."""
        return self.editor.is_done(prune(self._all(), to=self.sparsity))

    def check(self, *parts: Part) -> None:
        """Raise if parts name what the model has not, or if it has other layers than when it was made sparse."""
        if parts:
            self._check_not_released()
        check_same_layers(self.model, self._parameters)
        check_parts(self.model, parts)

    def watch(self, edits: Sequence[Edit], *, is_one_backward: bool = False) -> None:
        """Watch the gradients of the iterations to come for edits that look at them; with no edits, stop.

        Args:
            is_one_backward: whether an iteration has a single backward pass.
        """
        looked_at = [edit.by for edit in edits if edit.by.needs_gradients]
        by = By.MOMENTUM if By.MOMENTUM in looked_at else next(iter(looked_at), None)  # an average takes all iterations
        if by is not None:
            self.check_by(by)
        keep = self.editor.candidates(edits) if by and is_one_backward and self.storage == "compact" else None
        self.gradients.watch(by, keep=keep)

    # Training

    def shard(
        self, mesh: DeviceMesh, *, units: Sequence[str] | None = None, masks: bool = False, **settings: Any
    ) -> nn.Module:
        """Shard the model over the ranks of a mesh with torch's FSDP2; with compact storage. Make optimizers after it.

        Every rank then holds a share of the live values, and sends live values only. `fully_shard` calls of your own,
        inner modules first, do the same. Returns the model.

        Args:
            units: names or globs of the modules that are gathered one at a time; if not given, the blocks in the
                model's lists (ModuleList, Sequential). What is in none of them is gathered with the model.
            masks: whether masks are sharded too, and those of a layer gathered whenever it computes. Whatever looks at
                a mask (`summary`, `num_alive`) is then for all ranks to call.
            settings: further arguments of `torch.distributed.fsdp.fully_shard`, such as mp_policy.
        """
        self._check_not_released()
        sharding().shard(self, mesh, units=units, masks=masks, **settings)
        return self.model

    def notice_shards(self) -> None:
        """Find what was sharded since; all ranks come here together. Nothing can be before FSDP2 is loaded."""
        check_not_taken(self._parameters)
        if "torch.distributed.fsdp" in sys.modules:
            sharding().adopt(self)

    def attach(self, optimizer: Optimizer) -> Optimizer:
        """Keep what is pruned exactly zero under this optimizer: gradients, weights, and its state.

        Works with any optimizer: state shaped like its parameter is masked, other state is left alone.
        Returns the optimizer, so that it can be made and attached in one line.
        """
        self._check_not_released()
        self.notice_shards()
        inner = unwrapped(optimizer)
        check_optimizer(inner)
        is_new = inner not in self._optimizers.attached
        self._optimizers.attach(inner, own={id(parameter) for parameter in self.model.parameters()})
        if is_new:
            hook_steps(inner, self, self._optimizers)
        self.enforce()
        return optimizer

    def reset_optimizers(self) -> None:
        """Empty the state of attached optimizers, as if they were new."""
        for optimizer in self._optimizers.attached:
            optimizer.state.clear()

    def enforce(self) -> None:
        """Make weights, and the state of attached optimizers, exactly zero off the masks."""
        self._optimizers.enforce()

    def mask_copy(self, copy: nn.Module) -> None:
        """Make another copy of the model (a moving average, a deepcopy) exactly as sparse as this one.

        Do so before a moving average is used or saved: averaged over an edit, it has the weights of both masks. The
        copy may be wrapped, as by AveragedModel. A compact copy is as sparse as the model was when it was made; after
        an edit, make it anew.
        """
        mask_copy(copy, self._parameters)

    def to_dense_(self) -> nn.Module:
        """Make the model a plain one that happens to hold zeros, and let it go, for pickles, traces and exports.

        What lives can still be asked and saved. But edits are refused from now on, and so are steps of optimizers that
        were attached; a new SparseModel can be made of the model. Returns the model.
        """
        self._check_not_released()
        if self.ranks is not None:
            raise GrowpruneError(
                "the model is sharded, and no rank may have all of it dense: save it, and load it into a fresh model"
            )
        make_plain(self.model, self._parameters, self.pattern)
        self._optimizers.release()
        self.storage, self._is_released = "masked", True
        return self.model

    def _check_not_released(self) -> None:
        if self._is_released:
            raise GrowpruneError("the model was made dense by to_dense_(): make a new SparseModel of it")

    # Plans

    def follow(self, plan: Plan | Sequence[Stage]) -> Iterator[Phase]:
        """Go through a plan: do the edits of each phase, and hand the phase out to be trained.

        A fork's branches are handed out one after the other, each from the same model, and combined after the last.
        After `load_state_dict`, it goes on with the phase that was being trained, whose edits are done. A plan that is
        over has no more phases, and another can begin. A short form of `Cursor`, whose state goes with the model's.
        """
        from growprune.sparse.cursor import Cursor  # it changes a SparseModel, so it lies above this file

        place = self.place
        cursor = Cursor(self, plan)
        if place is not None and not (place["is_over"] and not cursor.is_place(place)):
            cursor.load_state_dict(place)
        self._cursor, self._place = cursor, None
        yield from cursor

    @property
    def cursor(self) -> Cursor | None:
        """Where the model stands in the plan that is being followed; None if none is."""
        return self._cursor

    @property
    def place(self) -> Mapping[str, Any] | None:
        """The state of the cursor of the plan that is being followed, or is to be gone on with."""
        return self._place if self._cursor is None else self._cursor.state_dict()

    def leave_plan(self) -> None:
        """Forget the plan that is being followed, wherever it stands, so that another can begin."""
        self._cursor = self._place = None

    # Copies

    def snapshot(self, part: Part | None = None, *, device: torch.device | str | None = None) -> Snapshot:
        """A copy of the tensors and masks of a part, or of the whole model; of sparse weights, the live values.

        Args:
            device: where the copy goes; each tensor's own device if not given.
        """
        self.notice_shards()
        return take_snapshot(self.model, self._parameters, None if part is None else set(part.tensors), device)

    def restore(self, snapshot: Mapping[str, tuple[Tensor, Tensor | None]], *, keep: bool = False) -> None:
        """Put copied tensors and masks back, whatever storage they were copied from.

        Args:
            keep: whether compact storage may keep those of sparse weights, instead of copying them once more.
        """
        self._check_not_released()
        self.notice_shards()
        self.restore_some(snapshot, keep=keep)
        if self._optimizers.attached or self._parameters.keys() - snapshot.keys():
            self.enforce()  # what was loaded is zero off its mask, and the state of optimizers may not be

    def restore_some(self, snapshot: Mapping[str, tuple[Tensor, Tensor | None]], *, keep: bool = False) -> None:
        """`restore`, for a model that is being built."""
        put_back(snapshot, self.model, self._parameters, self._optimizers, keep=keep)

    def clone(self) -> SparseModel:
        """An independent copy of the model and its masks, attached to no optimizer, in no plan."""
        alone: dict[int, Any] = {id(self._optimizers.attached): weakref.WeakSet()}
        for passing in (self._cursor, self._place, self.rule, self.gradients.add_up):
            if passing is not None:
                alone[id(passing)] = None
        return copy.deepcopy(self, alone)

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseModel:
        memo[id(self)] = clone = object.__new__(type(self))
        vars(clone).update(copy.deepcopy(vars(self), memo))
        return clone

    def __reduce_ex__(self, protocol: object) -> Any:
        """Whatever pickles would lose the optimizers that are attached, and in silence."""
        raise GrowpruneError(
            "a SparseModel cannot be pickled: keep its state_dict() and its model's, or write a file with "
            "growprune.save(sparse, path)"
        )

    # State

    def state_dict(self) -> dict[str, Any]:
        """Masks and place in the plan: beside the model's and the optimizer's state, all that an exact resume needs."""
        return {
            "masks": self.packed_masks(),
            "num_edits": self.editor.num_edits,
            "gradients": self.gradients.state_dict(),
            "cursor": self.place,
            "settings": self.settings,
        }

    @property
    def settings(self) -> dict[str, Any]:
        """What a state is gone on with, or not at all: it decides which weights the edits to come choose."""
        return {"seed": self.seed, "allocation": self.allocation, "pattern": self.pattern.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state back. Load the model's own state after it: compact weights are as long as masks say.

        With masked storage the order does not matter. The state of a model that was made with another seed, allocation
        or pattern is refused.
        """
        self._check_not_released()
        self.notice_shards()
        check_state(state, "masks", "num_edits", "gradients", "cursor")
        check_settings(state.get("settings", {}), self.settings)
        set_packed_masks(state["masks"], self._parameters, self._optimizers)
        self.editor.num_edits = state["num_edits"]
        self.gradients.load_state_dict(state["gradients"])
        self._cursor, self._place = None, state["cursor"]
        self.enforce()

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, *, device: torch.device | str | None = None
    ) -> dict[str, Any]:
        """Like `optimizer.state_dict()`, but of state shaped like a sparse weight, only that of live weights.

        Args:
            device: where the state goes; each tensor's own device if not given.
        """
        return self._optimizers.live_state(optimizer, device)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Take back what `optimizer_state` gave, whatever storage it was taken from."""
        self._optimizers.load_live_state(optimizer, state)

    # Live weights

    @property
    def stored(self) -> dict[str, SparseParameter]:
        """How the prunable parameters are stored, by name."""
        return self._parameters

    def mask(self, name: str) -> Tensor:
        """Which weights of a parameter live, as a bool tensor that is yours."""
        if name not in self._parameters:
            raise KeyError(f"{name!r} is not prunable; prunable are {', '.join(self._parameters)}")
        return self._parameters[name].mask().clone()

    @property
    def masks(self) -> dict[str, Tensor]:
        """The masks of all prunable parameters, by name."""
        return {name: self.mask(name) for name in self._parameters}

    @property
    def num_mask_changes(self) -> int:
        """Another number whenever masks may have changed: by edits, by a rule, or with a state that was loaded."""
        return self._optimizers.num_mask_changes

    def packed_masks(self) -> dict[str, Tensor]:
        """The masks of all prunable parameters, by name, eight weights to a byte."""
        return packed_masks(self._parameters)

    @property
    def num_alive(self) -> int:
        """How many prunable weights live."""
        return sum(self.alive_by_weight.values())

    @property
    def alive_by_weight(self) -> dict[str, int]:
        """How many live of each weight, counted with one wait for the device."""
        counts = []
        for name, weights in groupby(self.weights, key=lambda weight: weight.parameter):
            mask = self._parameters[name].mask()
            counts += [torch.count_nonzero(weight.of(mask)) for weight in weights]
        return dict(zip((weight.name for weight in self.weights), in_one_go(counts), strict=True))

    @property
    def num_prunable(self) -> int:
        """How many weights may be pruned, dead or alive."""
        return sum(weight.numel for weight in self.weights)

    def summary(self, example: Any = None) -> Summary:
        """How many weights live, per layer and in all; with an example input, FLOPs too. Print it for a table."""
        self.check()
        return summarise(self, example)

    def alive_in(self, weight: Weight) -> int:
        """How many of a weight's elements live."""
        return int(torch.count_nonzero(weight.of(self._parameters[weight.parameter].mask())))

    def _all(self) -> Part:
        return Part("all", tuple(self._parameters))


def check_sparse_model(given: object, who: str) -> None:
    """Raise if the model itself was given where its SparseModel is wanted."""
    if not isinstance(given, SparseModel):
        raise GrowpruneError(
            f"{who} was given a {type(given).__name__}, but takes a SparseModel: make one of the model, as in "
            f"SparseModel(model, sparsity=0.9)"
        )
