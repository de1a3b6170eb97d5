"""Sparse training in Lightning's Trainer: `Trainer(callbacks=[GrowPrune("gradual_gap", sparsity=0.9)])`.

The callback makes a SparseModel and a Cursor of the LightningModule when training begins, attaches the optimizers, and
leaves the rest to them: each real step of an optimizer advances the plan. The public hooks of Lightning do the rest:
checkpoints hold the state of both, the best checkpoint is one at the target sparsity, averaged copies of the model
have its masks, and replicas agree on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.integrations.callback import SparseCallback, call_only_if, looking
from growprune.plan import By
from growprune.sparse.cursor import Cursor
from growprune.sparse.model import SparseModel

try:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from growprune.integrations import lightning_sharded as sharded
    from growprune.integrations import lightning_trainer as of_trainer
    from growprune.integrations.lightning_optimizers import Clock, Schedules
except ImportError as error:
    raise GrowpruneError("GrowPrune needs lightning 2.5 or newer: pip install 'growprune[lightning]'") from error


class GrowPrune(SparseCallback, Callback):
    """Make a LightningModule sparse while a Trainer trains it.

    It takes the arguments of `growprune.sparsify`, without the model and the optimizer. If you give no lengths, the
    plan is as long as the training.

    Args:
        log_layers: also log the density of each layer.
    """

    _has_bare_copies = True
    """That of StochasticWeightAveraging is one."""
    _max_epochs: int | None = None
    _loaded: dict[str, Any] | None = None
    """What a checkpoint held, from when it is loaded until training begins."""
    _is_unbegun = False
    """Whether the checkpoint that was loaded is of before the first step: a finder's, which has no state of ours."""
    _loading: Any = None
    _is_elsewhere = False
    """Whether the Trainer validates, tests or predicts with another module than the one that was trained."""
    _first_batch: Any = None
    _clock: Clock | None = None
    _schedules: Schedules
    _position, _num_edits, _num_edits_validated = -1, 0, -1
    """The phase and the edits that all but the model know of, and those that the model was last validated with."""

    # Before training

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot work, before anything is done. Another module may be validated, tested and asked."""
        is_other = self._cursor is not None and self.sparse.model is not pl_module
        self._is_elsewhere = is_other and stage != "fit"
        if self._is_elsewhere:
            return
        of_trainer.check_trainer(trainer)
        sharded.check_storage(trainer, self.arguments.storage)
        sharded.read_first(trainer, functools.partial(self._make_fitting, trainer, pl_module))
        self._max_epochs = trainer.max_epochs  # before SWA adds an epoch for batch norms
        self._loaded, self._is_unbegun = None, False
        if is_other:
            raise GrowpruneError(
                "this GrowPrune already belongs to another module: make a new GrowPrune for each module"
            )
        if self._cursor is not None and self.arguments.storage == "compact" and not sharded.is_sharding(trainer):
            register: Callable[..., Any] = pl_module.register_load_state_dict_pre_hook
            self._loading = register(self._make_room)

    def _make_room(self, *_: Any) -> None:
        """A checkpoint is about to be loaded, whose live weights may be others: its masks follow (load_state_dict)."""
        self._stop_waiting()
        self.sparse.grow()

    def _make_fitting(self, trainer: Trainer, pl_module: LightningModule, checkpoint: Mapping[str, Any]) -> None:
        """A checkpoint of a sharded module is about to be loaded, with its optimizers: give them its live weights."""
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if not state:
            return  # `_check_loaded` refuses it when training begins
        self._check_arguments(state)
        if self._cursor is None:
            self._take_over(state)
            self._cursor = self._make(trainer, pl_module)
        for optimizer in trainer.optimizers:
            self.sparse.attach(optimizer)
        self.sparse.load_state_dict(state["sparse"])

    def _stop_waiting(self) -> None:
        if self._loading is not None:
            self._loading.remove()
            self._loading = None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Make the model sparse before its optimizers are made, so that what they load fits it."""
        self._is_unbegun = checkpoint["global_step"] == 0
        state = checkpoint["callbacks"].get(self.state_key)
        if state and sharded.is_sharding(trainer) and trainer.state.fn == "fit":
            sharded.set_random_numbers(trainer, state["rng"])  # on_fit_start came before
        if state is not None and self._cursor is None and trainer.state.fn == "fit":
            self._take_over(state)
            self._cursor = self._make(trainer, pl_module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the masks and the place in the plan back, if the module is trained, and not only tested."""
        if self._cursor is not None and not self._is_elsewhere:
            self._check_arguments(state_dict)
            self._check_place(state_dict)
            if self.sparse.ranks is None:  # else it has done so before the weights were loaded
                self.sparse.load_state_dict(state_dict["sparse"])
            self.cursor.load_state_dict(state_dict["cursor"])
            self._num_edits_validated = state_dict["num_edits_validated"]
            self._loaded = state_dict

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The checkpoint's model and callbacks are loaded, but not its optimizers and loops; if sharded, nothing is."""
        if not sharded.is_sharding(trainer):
            self._check_loaded(trainer)
        self._schedules = Schedules(trainer)
        if self._loaded is not None:
            sharded.set_random_numbers(trainer, self._loaded["rng"])

    def _check_loaded(self, trainer: Trainer) -> None:
        if trainer.ckpt_path is not None and self._loaded is None and not self._is_unbegun:
            raise GrowpruneError(
                f"{trainer.ckpt_path} has no state of GrowPrune, so it cannot be resumed: to start from its weights, "
                f"load them into the module and call fit without ckpt_path"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Everything is loaded: begin the plan, or resume it."""
        self._stop_waiting()
        self._check_loaded(trainer)
        self._check_lengths(trainer)
        if self._cursor is None:
            self._cursor = self._make(trainer, pl_module)
        self._schedules.check(self.cursor)
        self._copies.check(self.sparse, of_trainer.callbacks_of(trainer))
        self._make_figures(self._loaded)
        of_trainer.place_first(trainer, self)
        if not self._looks_first:
            self._begin(trainer)
        for judge, method in of_trainer.judging(trainer):
            call_only_if(functools.partial(self._is_to_judge, trainer), judge, method)
        if self._loaded is not None and self._loaded["is_mid_epoch"]:
            sharded.set_random_numbers(trainer, self._loaded["rng"])  # the loader's iterator, made again, drew one
        self._loaded = None

    @property
    def _looks_first(self) -> bool:
        """Whether the plan has yet to begin, with an edit that looks at the gradients of the first batch."""
        return self.cursor.position < 0 and self.cursor.schedule[0].phase.needs_gradients

    def _begin(self, trainer: Trainer) -> None:
        assert self._figures is not None
        self._clock = Clock(self.cursor, trainer.optimizers)
        self._position = self.cursor.position  # whose schedule has just begun, or was loaded
        self._follow_edits(trainer)
        if not self._figures.last:  # else the checkpoint has what was read last
            self._figures.read()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a plan whose first edit looks at gradients, now that there is a batch."""
        if self._looks_first:
            self._first_batch = (batch, batch_idx)
            self._begin(trainer)
            self._first_batch = None

    def _score(self, trainer: Trainer, sparse: SparseModel, by: By) -> None:
        """Look at the first batch, by the module's own training_step, which is called once more for it."""
        module = trainer.lightning_module
        if not module.automatic_optimization:
            raise GrowpruneError(
                f"{self.arguments.name} needs the loss of the first batch, which manual optimization does not return: "
                f"use rigl"
            )

        def loss() -> Tensor:
            with trainer.precision_plugin.train_step_context():
                found: Any = module.training_step(*self._first_batch)
            value: Tensor = found["loss"] if isinstance(found, Mapping) else found
            return value

        with looking(by):
            sparse.score(by, [loss])

    def _check_lengths(self, trainer: Trainer) -> None:
        """See how long the training is, and that a plan that has begun is as long."""
        lengths = of_trainer.lengths_of(trainer, self._max_epochs, self.arguments)
        if self._cursor is None:
            self._lengths = lengths
        if self._cursor is None or self.cursor.is_over:
            return
        if lengths[0] != self._lengths[0]:
            raise GrowpruneError(
                f"the plan has {self._lengths[0]} optimizer steps, but the Trainer makes {lengths[0]}: set "
                f"{of_trainer.remedy(trainer, self._lengths[1], self._lengths[0])}, as when the plan began"
            )
        if trainer.global_step == 0 < self.cursor.iteration:
            raise GrowpruneError(
                f"GrowPrune is at step {self.cursor.iteration} of {lengths[0]} of its plan, but the Trainer is at step "
                f"0: resume with fit(ckpt_path=...), or use a new module and a new GrowPrune"
            )

    def _make(self, trainer: Trainer, pl_module: LightningModule) -> Cursor:
        sharded.check_sharded(trainer, pl_module)
        return self._make_cursor_of(
            pl_module,
            remedy=functools.partial(of_trainer.remedy, trainer, self._lengths[1]),
            score=functools.partial(self._score, trainer),
        )

    # While it trains

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """If the step that was made has moved the plan on: let everything else follow; and log."""
        assert self._figures is not None
        if pl_module.automatic_optimization and trainer.global_step >= self._lengths[0] and not self.cursor.is_over:
            self.cursor.advance(self._lengths[0])  # some steps were skipped by a gradient scaler: do the edits left
        entered = self.cursor.schedule[self._position + 1 : self.cursor.position + 1]
        if any(scheduled.phase.restart for scheduled in entered) and not self.cursor.is_over:
            self._schedules.restart(trainer)
        self._position = self.cursor.position
        if self._follow_edits(trainer):
            self._figures.read()
        if not trainer.barebones:
            pl_module.log_dict({**self._figures.last, "phase": self._position}, on_step=True, on_epoch=False)

    def _follow_edits(self, trainer: Trainer) -> bool:
        """Let whatever knows of the model's weights follow edits of them. Return whether masks may have changed."""
        num_edits = self.sparse.editor.num_edits
        is_edited, self._num_edits = num_edits != self._num_edits, num_edits
        self._copies.follow(self.sparse, of_trainer.callbacks_of(trainer))
        if is_edited and self.arguments.storage == "compact":
            of_trainer.wrap_again(trainer)
        every = vars(trainer)["log_every_n_steps"]
        is_ruled = self.cursor.rule is not None and trainer.global_step % every == 0  # and may have changed masks
        if is_edited or is_ruled:  # on all processes alike, whatever masks they have
            of_trainer.check_ranks(self.sparse, trainer)
        return is_edited or is_ruled

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note which masks are validated."""
        if not trainer.sanity_checking and self._cursor is not None and not self._is_elsewhere:
            self._num_edits_validated = self.sparse.editor.num_edits

    def _is_to_judge(self, trainer: Trainer) -> bool:
        """True if the model is at its target sparsity, and its last validation was with the masks that it has."""
        is_stale = trainer.enable_validation and self._num_edits_validated != self.sparse.editor.num_edits
        return self.sparse.is_at_target and not is_stale

    def state_dict(self) -> dict[str, Any]:
        """The masks and the place in the plan, as plain values and tensors."""
        if self._cursor is None:
            return {}
        return {**self._state(), "num_edits_validated": self._num_edits_validated}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the random numbers, which Lightning does not keep."""
        if self._cursor is not None:
            state = {"rng": sharded.random_numbers(trainer), "is_mid_epoch": not trainer.is_last_batch}
            checkpoint["callbacks"][self.state_key] |= state

    # After training

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if the training was stopped before the model is as sparse as it should be."""
        self._warn_if_stopped("fit(ckpt_path=...)")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go. An edit within a batch is named where it may be why a backward pass has failed."""
        is_in_place = "modified by an inplace operation" in str(exception)
        if is_in_place and self._clock is not None and not pl_module.automatic_optimization:
            exception.add_note(self._clock.say_order())
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go."""
        self._stop_waiting()
        if self._clock is not None:
            self._clock.stop()
        sharded.read_as_before(trainer)
        for judge, method in of_trainer.judging(trainer):
            vars(judge).pop(method, None)
