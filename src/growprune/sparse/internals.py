"""The internal state of a SparseModel, for the other packages of growprune.

`SparseModel` (model.py) is the public class. `Internals` holds its state: how parameters are stored, which optimizers
train them, which gradients edits need, and the editor of the masks. The cursor, the rules, sharding, files, the engine
and the integrations get it with `internals(sparse)`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError, warn
from growprune.masks.bits import Snapshot, check_packed, like, pack, unpack, whole
from growprune.masks.layers import prunable_weights
from growprune.masks.patterns import Pattern, Unstructured
from growprune.masks.zeros import already_sparse
from growprune.plan import By, Edit, Part, prune
from growprune.sparse.checks import (
    check_not_taken,
    check_optimizer,
    check_parts,
    check_same_layers,
    is_fsdp2,
    named_tensors,
)
from growprune.sparse.editor import Editor
from growprune.sparse.gradients import Gradients
from growprune.sparse.learning_rates import Exponent
from growprune.sparse.optimizers import Optimizers, unwrapped
from growprune.sparse.sharded import sharding
from growprune.storage import SparseParameter, store

if TYPE_CHECKING:
    from growprune.sparse.model import SparseModel
    from growprune.sparse.rules.base import RunningRule


class Internals:
    """The state of a SparseModel, with its checked settings."""

    def __init__(
        self,
        model: nn.Module,
        *,
        sparsity: float,
        allocation: str,
        pattern: Pattern,
        keep_dense: Sequence[str],
        include: Sequence[str],
        seed: int,
        storage: str,
        lr_scaling: Exponent,
        rescale: bool,
    ) -> None:
        self.model, self.target_sparsity, self.allocation, self.pattern = model, sparsity, allocation, pattern
        self.keep_dense, self.include, self.seed, self.storage = keep_dense, include, seed, storage
        self.weights = prunable_weights(model, keep_dense=keep_dense, include=include)
        for weight in self.weights:
            pattern.check(weight, sparsity)
        self.stored = store(model, dict.fromkeys(weight.parameter for weight in self.weights), storage, pattern)
        """How the prunable parameters are stored, by name."""
        self.gradients = Gradients(self.stored)
        self.optimizers = Optimizers(self.stored, storage, self.gradients, lr_scaling)
        self.editor = Editor(
            self.weights,
            self.stored,
            self.gradients,
            self.optimizers,
            pattern=pattern,
            allocation=allocation,
            seed=seed,
            rescale=rescale,
        )
        self.whole = Part("all", tuple(self.stored))
        self.ranks: Any = None
        """The processes that share the weights, if the model is sharded."""
        self.shards_masks = False
        """True if masks are sharded too."""
        self.is_released = False
        """True after `to_dense_`."""
        self._has_stepped = False
        """True after the first step of an attached optimizer."""
        self.waiting: weakref.ref[Any] | None = None
        """A cursor of the model, whose plan may not have begun."""
        self.is_allocation_given = True
        """True if the user chose the allocation; if not, a plan for another one is refused."""
        self.notice_shards()

    def __deepcopy__(self, memo: dict[int, Any]) -> Internals:
        """Return an independent copy, attached to no optimizer, without a rule, and without replicas."""
        memo[id(self)] = clone = object.__new__(type(self))
        memo[id(self.optimizers.attached)] = weakref.WeakSet()
        for passing in (self.rule, self.gradients.add_up):
            if passing is not None:
                memo[id(passing)] = None
        vars(clone).update(copy.deepcopy(vars(self), memo) | {"waiting": None})
        return clone

    # Checks

    def notice_shards(self) -> None:
        """Find out what FSDP2 has sharded since the last call. All ranks of a sharded model must call this together."""
        check_not_taken(self.stored)
        if self.ranks is not None or is_fsdp2(self.model.modules()):
            sharding().adopt(self)

    def check(self, *parts: Part) -> None:
        """Raise if layers of the model were replaced, or if it lacks tensors that a part names."""
        if parts:
            self.check_not_released()
        check_same_layers(self.model, self.stored)
        check_parts(self.model, parts)

    def check_by(self, by: By) -> None:
        """Raise if this storage does not support a criterion."""
        if by in (By.MOMENTUM, By.GRASP) and self.storage == "compact":
            raise GrowpruneError(f"by={by.value} needs dense tensors of all weights: use storage='masked'")

    def check_not_released(self) -> None:
        if self.is_released:
            raise GrowpruneError("the model was made dense by to_dense_(): create a new SparseModel from it")

    def wait_for(self, cursor: Any) -> None:
        """Refuse steps until the plan of a cursor has begun."""
        self.waiting, self.optimizers.is_checked = weakref.ref(cursor), False

    def _check_begun(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise before a step if there is a plan that has not begun, because nothing would ever be pruned."""
        cursor = None if self.waiting is None else self.waiting()
        if cursor is not None and cursor.position < 0:
            if not any(group.get("lr", 1) for group in optimizer.param_groups):
                return  # torch's distributed checkpoint makes such a step to have state that it can load into
            raise GrowpruneError(
                "the optimizer steps, but the plan has not begun: call cursor.attach(optimizer), or call "
                "cursor.advance(0) before the first step and cursor.advance(iteration) after each"
            )
        self.waiting, self.optimizers.is_checked = None, True
        if not self._has_stepped:
            self._has_stepped = True
            self._warn_of_revived_zeros()

    def attach(self, optimizer: Any) -> None:
        """Keep pruned weights exactly zero under an optimizer, which another library may have wrapped."""
        self.check_not_released()
        self.notice_shards()
        inner = unwrapped(optimizer)
        check_optimizer(inner)
        own = {id(parameter) for parameter in self.model.parameters()}
        self.optimizers.attach(inner, own=own, check=self._check_begun)
        self.optimizers.enforce()

    def _warn_of_revived_zeros(self) -> None:
        """Warn if a pruned model is about to be trained with all of its weights live."""
        if self.editor.num_edits or self.storage != "masked" or self.rule is not None:
            return  # a rule may keep zeros among live weights
        zeros = already_sparse(self.model, self.weights)
        if zeros is not None and all(mask.all() for mask in (stored.mask() for stored in self.stored.values())):
            warn(
                f"{zeros:.4g} of the model's weights are zero, and training will make them non-zero: to keep them "
                f"pruned, use a method with initial_mask, such as gradual_gap, or SparseModel.from_zeros(model)"
            )

    # Edits

    def apply(self, edits: Sequence[Edit]) -> None:
        """Apply edits in order; the state of attached optimizers follows."""
        self.notice_shards()
        self.check(*[edit.part for edit in edits])
        self.optimizers.enforce()  # someone may have written to dead weights, and what grows must start from zero
        for edit in edits:
            self.editor.apply(edit)
        if any([edit.by.needs_gradients for edit in edits]):
            self.gradients.clear()

    def prune_early(self, edits: Sequence[Edit], part: Part) -> None:
        """Apply those rankings of later edits that lie within a part."""
        for edit in edits:
            self.editor.apply_within(edit, set(part.tensors))
        if edits:
            self.optimizers.enforce()

    def skip(self, edits: Sequence[Edit]) -> None:
        """Record edits that are applied elsewhere, so that later ones draw the same random numbers everywhere."""
        self.editor.num_edits += len(edits)

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

    @property
    def is_at_target(self) -> bool:
        return self.editor.is_done(self._to_target())

    def _to_target(self) -> Edit:
        return prune(self.whole, to=self.target_sparsity)

    # Training

    @property
    def rule(self) -> RunningRule | None:
        """What happens around each step of an attached optimizer."""
        return self.optimizers.rule

    def set_rule(self, rule: RunningRule | None) -> None:
        self.optimizers.rule = rule

    def watch(self, edits: Sequence[Edit]) -> None:
        """Watch the gradients of the next iterations for edits that need them; without edits, stop watching."""
        looked_at = [edit.by for edit in edits if edit.by.needs_gradients]
        by = By.MOMENTUM if By.MOMENTUM in looked_at else next(iter(looked_at), None)  # an average takes all iterations
        if by is not None:
            self.check_by(by)
        self.gradients.watch(by)

    def begin_anew(self, snapshot: Mapping[str, tuple[Tensor, Tensor | None]]) -> None:
        """Undo all training since a snapshot that was taken before the first edit."""
        self.watch(())
        self.gradients.clear()
        self.restore(snapshot)
        self.set_rule(None)
        self.editor.num_edits = 0
        self.optimizers.reset()

    # Copies

    def snapshot(self, part: Part | None = None, *, device: torch.device | str | None = None) -> Snapshot:
        """Copy the tensors and masks of a part, or of the whole model; only the live values of sparse weights.

        Args:
            device: the device of the copy; by default each tensor's own.
        """
        self.notice_shards()
        tensors = named_tensors(self.model)
        names = tensors if part is None else set(part.tensors)
        return {
            name: _copied(tensor, self.stored.get(name), tensor.device if device is None else device)
            for name, tensor in tensors.items()
            if name in names
        }

    def restore(self, snapshot: Mapping[str, tuple[Tensor, Tensor | None]], *, keep: bool = False) -> None:
        """Restore copied tensors and masks, from any storage.

        Args:
            keep: let compact storage keep the given tensors of sparse weights instead of copying them.
        """
        self.check_not_released()
        self.notice_shards()
        self.restore_some(snapshot, keep=keep)
        if self.optimizers.attached or self.stored.keys() - snapshot.keys():
            self.optimizers.enforce()  # what was loaded is zero off its mask, but the state of optimizers may not be

    def restore_some(self, snapshot: Mapping[str, tuple[Tensor, Tensor | None]], *, keep: bool = False) -> None:
        """`restore`, for a model that is being built."""
        tensors = named_tensors(self.model)
        for name, (values, mask) in snapshot.items():
            if mask is None:
                with torch.no_grad():
                    tensors[name].copy_(like(tensors[name], values))
            else:
                check_packed(mask, self.stored[name].shape)
                with self.optimizers.following(name) as stored:
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

    def set_packed_masks(self, masks: Mapping[str, Tensor]) -> None:
        """Load what `packed_masks` returned."""
        self.check_packed_masks(masks)
        for name, stored in self.stored.items():
            mask = unpack(masks[name], stored.shape, stored.parameter.device)
            if not torch.equal(mask, stored.mask()):
                self.optimizers.note_other_masks()
            with self.optimizers.following(name):
                stored.set_mask(mask)

    @property
    def decisive(self) -> dict[str, Any]:
        """The settings that decide which weights later edits choose. A state is loaded only if they are equal."""
        return {"seed": self.seed, "allocation": self.allocation, "pattern": self.pattern.name}

    # Live weights

    @property
    def num_mask_changes(self) -> int:
        """A counter that changes whenever masks may have changed: by edits, by a rule, or by a loaded state."""
        return self.optimizers.num_mask_changes

    def alive_by_weight(self) -> dict[str, int]:
        """Return the number of live elements of each weight. Waits for the device once."""
        return self.editor.num_alive(self.weights, pattern=Unstructured())


def internals(sparse: SparseModel) -> Internals:
    """Return the internal state of a SparseModel, for the packages of growprune only."""
    return sparse._internals


def _copied(tensor: Tensor, stored: SparseParameter | None, device: torch.device | str) -> tuple[Tensor, Tensor | None]:
    if stored is None:
        return whole(tensor.detach()).to(device, copy=True), None
    return stored.to_live(tensor.detach()).to(device, copy=True), pack(stored.mask()).to(device)
