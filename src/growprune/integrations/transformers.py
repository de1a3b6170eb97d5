"""Sparse training with the Trainer of transformers, as a callback.

    callback = GrowPruneCallback("gradual_gap", sparsity=0.9)
    trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
    trainer.train()                         # or train(resume_from_checkpoint=last_checkpoint(folder))
    print(callback.sparse.summary())

Each of the Trainer's checkpoints has the state of the masks and of the plan in a folder `growprune`, as safetensors and
JSON. Resuming from it is bit-exact. docs/transformers.md has the rest.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import distributed, nn
from torch.optim.lr_scheduler import LambdaLR

from growprune.errors import GrowpruneError
from growprune.integrations.callback import SparseCallback, call_only_if
from growprune.integrations.checkpoint_folders import check_zeros, last_checkpoint, left_out, read_state, write_state
from growprune.masks.bits import Snapshot
from growprune.sparse.cursor import Cursor

try:
    from transformers import EarlyStoppingCallback, TrainerCallback
    from transformers.trainer_callback import ExportableState

    from growprune.integrations import transformers_sharded as sharded
    from growprune.integrations import transformers_trainer as of_trainer
except ImportError as error:
    raise GrowpruneError("GrowPruneCallback needs transformers: pip install 'growprune[transformers]'") from error

MISSING = (
    "resume with resume_from_checkpoint=last_checkpoint(output_dir), or load its weights into the model and train "
    "without resume_from_checkpoint"
)
"""What to do with a checkpoint that lacks our state."""

__all__ = ["GrowPruneCallback", "last_checkpoint"]


class GrowPruneCallback(SparseCallback, TrainerCallback):
    """Make the model of a Trainer sparse while it is trained.

    It takes the arguments of `growprune.sparsify`, without the model and the optimizer. If you give no lengths, the
    plan is as long as the training.

    Args:
        log_layers: also log the density of each layer.
    """

    _others: Sequence[TrainerCallback] = ()
    """All callbacks of the Trainer, which may keep copies of the model."""
    is_training = False
    _before: Snapshot | None = None
    """The model as it was before its plan, while `auto_find_batch_size` may begin anew: until a step is made."""

    # Beginning

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse at once what cannot work, and take over the loading of checkpoints."""
        version, storage = sharded.version_asked_for(args), self.arguments.storage
        sharded.check_sharding(uses_deepspeed=bool(args.deepspeed), fsdp_version=version, storage=storage)
        self._take_over_loading(of_trainer.trainer_being_made())

    def _take_over_loading(self, trainer: Any) -> None:
        """Run before a checkpoint's weights are loaded: compact weights must have the right live ones by then."""
        if sharded.is_sharding(trainer):
            of_trainer.take_over(trainer, "_load_from_checkpoint", functools.partial(self._make_fitting, trainer))
        else:
            of_trainer.take_over(trainer, "_load_from_checkpoint", self._make_room)

    def _make_room(self, folder: str | Path, *_: Any, **__: Any) -> None:
        """A checkpoint is about to be loaded, whose live weights may be others: its masks follow (`_resume`)."""
        self.is_training = False  # an interrupted training does not continue from where it was
        if self._cursor is not None and self.arguments.storage == "compact":
            self._read(folder)  # which is refused before anything is changed
            self.sparse.grow()

    def _read(self, folder: str | Path) -> dict[str, Any]:
        saved = read_state(Path(folder), MISSING)
        self._check_arguments(saved)
        return saved

    def _make_fitting(self, trainer: Any, folder: str | Path, *_: Any, **__: Any) -> None:
        """A checkpoint is about to be loaded into a sharded model and its optimizer: give them its live weights."""
        model = sharded.plain(trainer.model)
        self._refuse(trainer, model)
        saved = self._read(folder)
        if self._cursor is None:
            self._take_over(saved)
            self._cursor = self._make_cursor(model, trainer, None)  # it looks at no batches: its plan has begun
        self._check_alike(saved, trainer.state.max_steps)
        self.sparse.attach(trainer.optimizer)
        self.sparse.load_state_dict(saved["sparse"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the model sparse and begin its plan, or resume it."""
        trainer, folder = of_trainer.running_trainer()
        model, optimizer = sharded.plain(kwargs["model"]), kwargs["optimizer"]
        self._refuse(trainer, model)
        saved = None if folder is None else self._read(folder)
        self._prepare_second_try(trainer, saved)
        if self._cursor is None or (saved is None and self._before is not None):
            loader = kwargs["train_dataloader"]
            if saved is None:
                self._lengths = (state.max_steps, of_trainer.steps_per_epoch(args, loader))
            else:
                self._take_over(saved)
            self._cursor = self._make_cursor(model, trainer, loader)
        if self.cursor.position < 0 and saved is None and self._before is None and args.auto_find_batch_size:
            self._before = self.sparse.snapshot(device="cpu")  # a GPU is short of memory
        self._others = trainer.callback_handler.callbacks
        self._copies.check(self.sparse, self._others)
        if saved is not None:
            self._check_alike(saved, state.max_steps)
            self._resume(saved, optimizer)
        elif self.cursor.position >= 0 and not self.cursor.is_over:
            raise GrowpruneError(
                f"the plan is at step {self.cursor.iteration} of {self._lengths[0]}: resume with "
                f"train(resume_from_checkpoint=True), or make a new model and a new GrowPruneCallback"
            )
        self.cursor.attach(optimizer)
        if self.sparse.ranks is not None:
            sharded.save_dense(trainer, self.sparse)
        if not self.cursor.is_over and of_trainer.has_restarts(self.cursor):
            of_trainer.restart_rates(args, trainer.lr_scheduler, self.cursor)
        self._make_figures(saved)
        if self.sparse.ranks is None:  # if sharded, `on_init_end` has done it
            self._take_over_loading(trainer)
        of_trainer.take_over(trainer, "_load_best_model", functools.partial(self._take_best, trainer))
        for stopping in self._stopping():
            call_only_if(lambda: self.sparse.is_at_target, stopping, "on_evaluate")
        _place(trainer, self)
        self._copies.follow(self.sparse, self._others)
        self.is_training = True

    def _stopping(self) -> list[EarlyStoppingCallback]:
        return [other for other in self._others if isinstance(other, EarlyStoppingCallback)]

    def _refuse(self, trainer: Any, model: nn.Module) -> None:
        sharded.check_sharding(
            uses_deepspeed=trainer.is_deepspeed_enabled,
            fsdp_version=sharded.version_in_use(trainer),
            storage=self.arguments.storage,
        )
        sharded.check_trainer(trainer)
        if (count := sum(isinstance(c, GrowPruneCallback) for c in trainer.callback_handler.callbacks)) > 1:
            raise GrowpruneError(
                f"the Trainer has {count} GrowPruneCallbacks, but a model follows one plan: keep one of them"
            )
        if self._cursor is not None and self.sparse.model is not model:
            raise GrowpruneError("this GrowPruneCallback belongs to another model: make a new one for each model")
        of_trainer.check_trainer(trainer, self.arguments.storage)

    def _prepare_second_try(self, trainer: Any, saved: dict[str, Any] | None) -> None:
        """With `auto_find_batch_size` a Trainer begins anew when memory runs out: undo the first edits, or refuse."""
        if self._before is not None and saved is None:
            self.sparse.begin_anew(self._before)
        elif self.is_training and trainer.args.auto_find_batch_size:
            has_moved = saved["cursor"]["iteration"] != self.cursor.iteration if saved else not self.cursor.is_over
            if has_moved:
                raise GrowpruneError(
                    f"the training was interrupted at step {self.cursor.iteration} of {self._lengths[0]}, where "
                    f"auto_find_batch_size cannot restart it: make a new model and a new GrowPruneCallback, with "
                    f"per_device_train_batch_size={trainer._train_batch_size}"
                )

    def _make_cursor(self, model: nn.Module, trainer: Any, loader: Any) -> Cursor:
        cursor = self._make_cursor_of(
            model,
            remedy=functools.partial(of_trainer.remedy, trainer.args, self._lengths[1]),
            score=functools.partial(of_trainer.score, trainer, loader),
            sparse=None if self._cursor is None else self.sparse,
        )
        is_ours = type(trainer.lr_scheduler) is LambdaLR and trainer._created_lr_scheduler
        if of_trainer.has_restarts(cursor) and not is_ours:
            raise GrowpruneError(
                f"each phase of {self.arguments.name} restarts the learning-rate schedule, which only works with the "
                f"schedules of TrainingArguments, not your own: give GrowPruneCallback restart=False"
            )
        return cursor

    # Training

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse copies that other callbacks have made when the training began."""
        if self._cursor is not None:
            self._copies.check(self.sparse, self._others)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer's own steps advance the plan. At the end, those that a gradient scaler skipped are made up."""
        if self._cursor is None:
            return
        self._before = None
        if not self.cursor.is_over and state.global_step >= state.max_steps:
            self.cursor.advance(self._lengths[0])
        self._copies.follow(self.sparse, self._others)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add figures to what is logged of the training."""
        if self._figures is not None and logs is not None and "loss" in logs:
            figures = self._figures.read()
            logs.update(figures)
            state.log_history[-1].update(figures)

    def _take_best(self, trainer: Any) -> None:
        """The Trainer is about to load the weights of the best checkpoint: take its masks."""
        best = read_state(Path(trainer.state.best_model_checkpoint))
        self.sparse.load_state_dict(best["sparse"])
        self.sparse.restore(best["weights"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Warn if the training was stopped before the model is as sparse as it should be."""
        self.is_training, self._before = False, None
        for stopping in self._stopping():
            vars(stopping).pop("on_evaluate", None)
        self._warn_if_stopped("train(resume_from_checkpoint=True)")

    # Checkpoints

    def save(self, folder: Path) -> None:
        """Add our state to a checkpoint that has the weights already."""
        is_sharded = self.sparse.ranks is not None  # and only the first process is here
        weights = {} if is_sharded else self.sparse.snapshot(left_out(self.sparse.model, folder))
        write_state(folder, {**self._state(), "weights": weights})

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait until our state is written (see `_Last`): others may be about to read it, as the best."""
        if args.world_size > 1:
            distributed.barrier()
        if self._cursor is not None and self.sparse.ranks is not None:
            sharded.agree_on_the_best(args, state)

    def _check_alike(self, saved: dict[str, Any], max_steps: int) -> None:
        self._check_place(saved)
        if not saved["cursor"]["is_over"] and saved["lengths"][0] != max_steps:
            raise GrowpruneError(
                f"the checkpoint was written in a training of {saved['lengths'][0]} optimizer steps, but the Trainer "
                f"makes {max_steps}: set TrainingArguments(max_steps={saved['lengths'][0]})"
            )

    def _resume(self, saved: dict[str, Any], optimizer: Any) -> None:
        """Resume from a checkpoint, of which the Trainer has loaded the weights and the optimizer."""
        if self.sparse.ranks is not None:  # and `_make_fitting` has seen to the masks
            self.cursor.load_state_dict(saved["cursor"])
            return
        check_zeros(self.sparse, saved["sparse"]["masks"], saved["weights"])
        state = optimizer.state_dict()
        optimizer.state.clear()  # it is of the weights as they are stored after their masks are loaded
        is_compact = self.sparse.storage == "compact"
        if self.cursor.position < 0 or is_compact:  # all live (`_make_room`): nothing is lost
            self.sparse.attach(optimizer)
        self.sparse.load_state_dict(saved["sparse"])
        self.sparse.restore(saved["weights"])
        optimizer.load_state_dict(state)
        self.cursor.load_state_dict(saved["cursor"])


class _Last(TrainerCallback, ExportableState):
    """Stands last, so that others see the true metric, and is asked for a state whenever a checkpoint is written."""

    def __init__(self, callback: GrowPruneCallback | None = None, trainer: Any = None) -> None:
        self._callback, self._trainer = callback, trainer

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **kwargs: Any) -> None:
        """Keep a model that is not at the target sparsity from being the best."""
        assert self._callback is not None
        name = args.metric_for_best_model
        if not self._callback.is_training or name is None or self._callback.sparse.is_at_target:
            return
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name in metrics:
            metrics[name] = math.nan  # which is better than no other

    def state(self) -> dict[str, Any]:
        """Add our state to a checkpoint: now, since next its own state completes it, and older ones are deleted.

        A Trainer also asks when it begins to train a second time, when there is nothing to save.
        """
        if self._callback is not None and sys._getframe(1).f_code.co_name == "_save_checkpoint":
            self._callback.save(Path(self._trainer.args.output_dir) / f"checkpoint-{self._trainer.state.global_step}")
        return {"args": {}, "attributes": {}}


def _place(trainer: Any, callback: GrowPruneCallback) -> None:
    """Let the callback be the first, so that loggers get what it adds, and have its `_Last` at the end."""
    callbacks = trainer.callback_handler.callbacks
    others = [other for other in callbacks if other is not callback and not isinstance(other, _Last)]
    callbacks[:] = [callback, *others, _Last(callback, trainer)]
    trainer.state.stateful_callbacks.setdefault(_Last.__name__, {})
