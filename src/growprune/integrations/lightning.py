"""Sparse training in Lightning's Trainer: `Trainer(callbacks=[GrowPrune("gradual_gap", sparsity=0.9)])`.

The callback makes the LightningModule sparse when training begins; each step of its optimizers advances the plan.
Checkpoints hold the masks and the place in the plan, the best checkpoint is one at the target sparsity, and averaged
copies of the model have its masks.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from growprune.errors import GrowpruneError, how_to_install
from growprune.integrations.callback import Figures, SparseCallback, call_first, call_only_if, check_saved, scoring
from growprune.plan import By
from growprune.plan.settings import check_state
from growprune.sparse.cursor import Cursor
from growprune.sparse.model import SparseModel
from growprune.sparse.rng import rng_state, set_rng_state
from growprune.training.settings import Settings
from growprune.training.sparsifier import Sparsifier

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint, ModelPruning
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ImportError as error:
    raise GrowpruneError(f"GrowPrune needs lightning 2.5 or newer: {how_to_install('lightning')}") from error


class GrowPrune(SparseCallback, Callback):
    """Make a LightningModule sparse while a Trainer trains it.

    It takes the arguments of `growprune.sparsify`, without the model and the optimizer. If you give no lengths, the
    plan is as long as the training.

    Args:
        log_layers: also log the density of each layer.
    """

    _has_bare_copies = True
    """StochasticWeightAveraging keeps such a copy."""
    _max_epochs: int | None = None
    _loaded: Mapping[str, Any] | None = None
    """The state in a loaded checkpoint, until training begins."""
    _first_batch: Any = None
    _schedules: Schedules
    _position, _num_edits, _num_edits_validated = -1, 0, -1
    """The phase that schedules follow, the number of edits that copies follow, and its value at the last validation."""

    # Before training

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse unsupported trainers before anything is changed. Other modules may still be validated or tested."""
        if self._is_elsewhere(pl_module) and stage != "fit":
            return
        check_trainer(trainer, pl_module, self.settings.storage)
        if self._is_elsewhere(pl_module):
            raise GrowpruneError(
                "this GrowPrune already belongs to another module: make a new GrowPrune for each module"
            )
        self._max_epochs = trainer.max_epochs  # before SWA adds an epoch for batch norms
        self._loaded = None
        # this hook of the module runs before its weights are loaded, which must fit the masks
        call_first(pl_module, "on_load_checkpoint", functools.partial(self._load_masks, trainer, pl_module))

    def _is_elsewhere(self, module: LightningModule) -> bool:
        """True if the Trainer runs another module than the one that this callback has made sparse."""
        return self._sparsifier is not None and self.sparse.model is not module

    def _load_masks(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Load our state before Lightning loads weights and creates or loads optimizers, so that they fit the masks."""
        state, is_fitting = checkpoint.get("callbacks", {}).get(self.state_key), trainer.state.fn == "fit"
        if not state:
            if is_fitting and checkpoint["global_step"] > 0:  # at step 0, a finder restores its own checkpoint
                raise GrowpruneError(
                    f"{trainer.ckpt_path} has no state of GrowPrune, so it cannot be resumed: to start from its "
                    f"weights, load them into the module and call fit without ckpt_path"
                )
            return
        if self._sparsifier is None and not is_fitting:
            return
        check_state(state, "sparsifier", "figures", "rng", "num_edits_validated")
        check_saved(state["sparsifier"], self.settings)
        if self._sparsifier is None:
            self._sparsifier = self._make(trainer, pl_module, resume=state["sparsifier"])
        self._load(state)
        self._num_edits_validated = state["num_edits_validated"]
        self._loaded = state

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the schedules. By now, the checkpoint's model is loaded, but not its optimizers and loops."""
        self._schedules = Schedules(trainer)
        self._restore_random_numbers(trainer)

    def _restore_random_numbers(self, trainer: Trainer) -> None:
        if self._loaded is not None and trainer.world_size == 1:  # only the first replica's are saved
            set_rng_state(self._loaded["rng"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the plan, or resume it, now that everything is loaded."""
        total, per_epoch = lengths_of(trainer, self._max_epochs, self.settings)
        if self._sparsifier is None:
            lengths = {"iterations": total, "iterations_per_epoch": per_epoch}
            self._sparsifier = self._make(trainer, pl_module, *trainer.optimizers, **lengths)
        self._check_place(total, trainer.global_step, functools.partial(remedy, trainer, per_epoch))
        with self._plain_if_refused():
            self._schedules.check(self.cursor)
            self._check_copies(callbacks_of(trainer))
            if not self._scores_first:
                self._begin(trainer)
        # put this callback first, so that others find what it logs, in a new list, because the old one is in use
        untyped: Any = trainer  # the class Trainer does not declare its callbacks
        untyped.callbacks = [self, *(other for other in callbacks_of(trainer) if other is not self)]
        for judge, method in judging(trainer):
            call_only_if(functools.partial(self._is_to_judge, trainer), judge, method)
        if self._loaded is not None and self._loaded.get("is_mid_epoch"):
            self._restore_random_numbers(trainer)  # creating the loader's iterator again drew one
        self._loaded = None
        vars(pl_module).pop("on_load_checkpoint", None)  # it cannot be pickled

    def _make(self, trainer: Trainer, pl_module: LightningModule, *optimizers: Any, **how: Any) -> Sparsifier:
        how |= {"remedy": functools.partial(remedy, trainer, how.get("iterations_per_epoch"))}
        return Sparsifier(pl_module, self.settings, optimizers, score=functools.partial(self._score, trainer), **how)

    @property
    def _scores_first(self) -> bool:
        """True if the plan has not begun, and its first edit needs the gradients of the first batch."""
        return self.cursor.position < 0 and self.cursor.schedule[0].phase.needs_gradients

    def _begin(self, trainer: Trainer) -> None:
        # the last optimizer that trains prunable weights advances the plan
        self.sparsifier.begin(sorted(trainer.optimizers, key=lambda one: bool(self.sparse.trained_by(one))))
        if self._figures is None or self._loaded is None:
            self._figures = Figures(self.cursor, by_weight=self._log_layers)
        self._position = self.cursor.position  # its schedule has just begun, or was loaded
        self._follow_edits(trainer)
        if not self._figures.last:  # else the checkpoint contains the last figures
            self._figures.read()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a plan whose first edit needs gradients, now that there is a batch."""
        if self._scores_first:
            self._first_batch = (batch, batch_idx)
            with self._plain_if_refused():
                self._begin(trainer)
            self._first_batch = None

    def _score(self, trainer: Trainer, sparse: SparseModel, by: By) -> None:
        """Compute gradients of the first batch, by one more call of the module's own training_step."""
        module = trainer.lightning_module
        if not module.automatic_optimization:
            raise GrowpruneError(
                f"{self.settings.name} needs the loss of the first batch, which manual optimization does not return: "
                f"use rigl"
            )

        def loss() -> Tensor:
            with trainer.precision_plugin.train_step_context():
                found: Any = module.training_step(*self._first_batch)
            value: Tensor = found["loss"] if isinstance(found, Mapping) else found
            return value

        with scoring(by):
            sparse.score(by, [loss])

    # During training

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update schedules, copies and figures if the step has advanced the plan, and log."""
        assert self._figures is not None
        total = self.cursor.num_iterations
        if pl_module.automatic_optimization and trainer.global_step >= total and not self.cursor.is_over:
            self.cursor.advance(total)  # a gradient scaler skipped steps: make the remaining edits
        entered = self.cursor.schedule[self._position + 1 : self.cursor.position + 1]
        if any(scheduled.phase.restart for scheduled in entered) and not self.cursor.is_over:
            self._schedules.restart(trainer)
        self._position = self.cursor.position
        if self._follow_edits(trainer):
            self._figures.read()
        if not trainer.barebones:
            pl_module.log_dict({**self._figures.last, "phase": self._position}, on_step=True, on_epoch=False)

    def _follow_edits(self, trainer: Trainer) -> bool:
        """Mask copies after edits. Return True if figures must be read again."""
        num_edits = self.sparse.editor.num_edits
        is_edited, self._num_edits = num_edits != self._num_edits, num_edits
        self._mask_copies(callbacks_of(trainer))
        every = vars(trainer)["log_every_n_steps"]
        return is_edited or (self.cursor.rule is not None and trainer.global_step % every == 0)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record which masks are validated."""
        if not trainer.sanity_checking and self._sparsifier is not None and not self._is_elsewhere(pl_module):
            self._num_edits_validated = self.sparse.editor.num_edits

    def _is_to_judge(self, trainer: Trainer) -> bool:
        """True if the model is at its target sparsity, and its last validation used its current masks."""
        is_stale = trainer.enable_validation and self._num_edits_validated != self.sparse.editor.num_edits
        return self.sparse.is_at_target and not is_stale

    def state_dict(self) -> dict[str, Any]:
        """Return the masks and the place in the plan, as plain values and tensors."""
        if self._sparsifier is None:
            return {}
        return {**self._state(), "num_edits_validated": self._num_edits_validated}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the state of the random number generators, which Lightning does not save."""
        if self._sparsifier is not None:
            checkpoint["callbacks"][self.state_key] |= {"rng": rng_state(), "is_mid_epoch": not trainer.is_last_batch}

    # After training

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if the training was stopped before the model is as sparse as it should be."""
        self._warn_if_stopped("fit(ckpt_path=...)")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Release hooks. If an edit within a batch may have caused the error, say so."""
        if "modified by an inplace operation" in str(exception) and not pl_module.automatic_optimization:
            exception.add_note(
                "GrowPrune prunes and grows when the last optimizer with prunable weights steps: in "
                "configure_optimizers, return last the optimizer that steps last in training_step"
            )
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove our changes to the module and to other callbacks."""
        vars(pl_module).pop("on_load_checkpoint", None)
        for judge, method in judging(trainer):
            vars(judge).pop(method, None)


# Checks and properties of the Trainer


def check_trainer(trainer: Trainer, module: LightningModule, storage: str) -> None:
    """Raise if a Trainer cannot train a sparse model."""
    if not isinstance(trainer, Trainer):
        raise GrowpruneError(
            f"GrowPrune needs a Trainer of lightning.pytorch, got one of {type(trainer).__module__}: import "
            f"lightning.pytorch, not pytorch_lightning"
        )
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        raise GrowpruneError(
            f"GrowPrune does not work with {type(trainer.strategy).__name__}: use strategy='ddp' or one device, or a "
            f"loop of your own with sparse.shard(mesh)"
        )
    if storage == "compact" and isinstance(trainer.strategy, DDPStrategy):
        raise GrowpruneError(
            "storage='compact' does not work with DDP, which keeps the weights from before an edit: use "
            "storage='masked'"
        )
    if storage == "compact" and not module.automatic_optimization:
        raise GrowpruneError(
            "storage='compact' does not work with manual optimization, where edits replace weights within a batch: use "
            "storage='masked'"
        )
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks_of(trainer)):
        raise GrowpruneError(
            "GrowPrune does not work with GradientAccumulationScheduler, which hides the number of steps: use "
            "Trainer(accumulate_grad_batches=...)"
        )
    if any(isinstance(callback, ModelPruning) for callback in callbacks_of(trainer)):
        raise GrowpruneError("ModelPruning prunes the same weights as GrowPrune: give the Trainer only one of the two")


def lengths_of(trainer: Trainer, max_epochs: int | None, settings: Settings) -> tuple[int, int | None]:
    """Return how many optimizer steps a trainer makes, in total and in an epoch.

    Args:
        max_epochs: as the user gave it.
        settings: with manual optimization, their `iterations` give the number of steps.
    """
    batches = trainer.num_training_batches
    per_epoch = math.ceil(batches / trainer.accumulate_grad_batches) if math.isfinite(batches) else None
    total = trainer.estimated_stepping_batches
    if per_epoch and max_epochs is not None and max_epochs != trainer.max_epochs:
        total = min(total, per_epoch * max_epochs)
    if not trainer.lightning_module.automatic_optimization:
        total = total if settings.iterations is None else settings.iterations
    is_endless = not math.isfinite(total) or total < 0
    if is_endless and per_epoch is None and max_epochs not in (None, -1):
        raise GrowpruneError(
            f"the data have no length, so max_epochs={max_epochs} does not give the number of steps: use "
            f"Trainer(max_steps=...)"
        )
    if is_endless:
        raise GrowpruneError("the Trainer has no limit, but a plan needs one: give it max_epochs or max_steps")
    return int(total), per_epoch


def remedy(trainer: Trainer, per_epoch: int | None, iterations: int) -> str:
    """Return what to give a Trainer for a training of `iterations` optimizer steps."""
    if vars(trainer)["fast_dev_run"]:
        return "Trainer(fast_dev_run=False)"
    if per_epoch and iterations % per_epoch == 0:
        return f"Trainer(max_epochs={iterations // per_epoch})"
    return f"Trainer(max_steps={iterations})"


def callbacks_of(trainer: Any) -> list[Callback]:
    return list(trainer.callbacks)  # the class Trainer does not declare them


def judging(trainer: Trainer) -> Iterator[tuple[Callback, str]]:
    """Yield the methods by which callbacks judge a model: to keep the best, or to stop the training."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, ModelCheckpoint) and callback.monitor is not None:
            yield callback, "check_monitor_top_k"
        if isinstance(callback, EarlyStopping):
            yield from ((callback, method) for method in ("on_train_epoch_end", "on_validation_end"))


class Schedules:
    """The initial learning-rate schedules and optimizer settings of a trainer, for phases that restart."""

    def __init__(self, trainer: Trainer) -> None:
        self._schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._states = [copy.deepcopy(scheduler.state_dict()) for scheduler in self._schedulers]
        self._groups = [
            [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]

    def check(self, cursor: Cursor) -> None:
        """Raise if a phase restarts a schedule that cannot restart."""
        is_plateau = any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in self._schedulers)
        if is_plateau and any(scheduled.phase.restart for scheduled in cursor.schedule):
            raise GrowpruneError(
                "ReduceLROnPlateau cannot restart with each phase: give GrowPrune restart=False, or use another "
                "schedule"
            )

    def restart(self, trainer: Trainer) -> None:
        """Restore all schedules and settings. The cursor clears the optimizers' state.

        Schedules that another callback has replaced, as StochasticWeightAveraging does, stay as they are.
        """
        if [id(config.scheduler) for config in trainer.lr_scheduler_configs] != [id(mine) for mine in self._schedulers]:
            return
        for scheduler, state in zip(self._schedulers, self._states, strict=True):
            scheduler.load_state_dict(copy.deepcopy(state))
        for optimizer, groups in zip(trainer.optimizers, self._groups, strict=True):
            for group, first in zip(optimizer.param_groups, groups, strict=True):
                group.update(copy.deepcopy(first))
