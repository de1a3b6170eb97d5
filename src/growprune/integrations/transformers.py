"""Sparse training with the Trainer of transformers, as a callback.

    callback = GrowPruneCallback("gradual_gap", sparsity=0.9)
    trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
    trainer.train()                         # or train(resume_from_checkpoint=last_checkpoint(folder))
    print(callback.sparse.summary())

Each checkpoint of the Trainer contains the state of the masks and of the plan in a folder `growprune`, as safetensors
and JSON. Resuming from it is bit-exact. See docs/transformers.md for more.
"""

from __future__ import annotations

import bisect
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, distributed, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from growprune.errors import GrowpruneError, how_to_install
from growprune.integrations.callback import Figures, SparseCallback, call_first, call_only_if, check_saved, scoring
from growprune.integrations.checkpoint_folders import last_checkpoint, left_out, read_state, write_state
from growprune.plan import By
from growprune.plan.settings import check_state
from growprune.sparse.cursor import Cursor
from growprune.sparse.model import SparseModel
from growprune.training.sparsifier import Sparsifier

try:
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, get_scheduler
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise GrowpruneError(f"GrowPruneCallback needs transformers: {how_to_install('transformers')}") from error

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

    # Beginning

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse unsupported settings, and load masks together with checkpoints from now on."""
        self._take_part(calling_trainer())

    def _take_part(self, trainer: Any) -> None:
        """Load masks each time before a Trainer loads weights, because weights must fit the masks of the model."""
        check_trainer(trainer, self.settings.storage)
        call_first(trainer, "_load_from_checkpoint", functools.partial(self._resume, trainer))
        call_first(trainer, "_load_best_model", functools.partial(self._take_best, trainer))

    def _resume(self, trainer: Any, folder: str | Path, *_: Any, **__: Any) -> None:
        """Load our state before the Trainer loads weights and creates or loads its optimizer, so that they fit."""
        self._check_model(trainer.model)
        self.is_training = False  # an interrupted training leaves it True
        saved = read_state(Path(folder), MISSING)
        check_state(saved, "sparsifier", "figures", "left_out")
        check_saved(saved["sparsifier"], self.settings)
        if self._sparsifier is None:
            self._sparsifier = self._make(trainer, trainer.model, resume=saved["sparsifier"])
        self._load(saved)
        self.sparse.restore(saved["left_out"])

    def _take_best(self, trainer: Any) -> None:
        """Load the masks of the best checkpoint, and the parameters that the Trainer does not load."""
        best = read_state(Path(trainer.state.best_model_checkpoint))
        self.sparse.load_state_dict(best["sparsifier"]["sparse"])
        self.sparse.restore(best["left_out"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the model sparse and begin its plan, or resume it."""
        trainer, model, optimizer = calling_trainer(), kwargs["model"], kwargs["optimizer"]
        self._take_part(trainer)
        self._check_model(model)
        callbacks = self._others = trainer.callback_handler.callbacks
        if (count := sum(isinstance(c, GrowPruneCallback) for c in callbacks)) > 1:
            raise GrowpruneError(
                f"the Trainer has {count} GrowPruneCallbacks, but a model follows one plan: keep one of them"
            )
        per_epoch = steps_per_epoch(args, loader := kwargs["train_dataloader"])
        if self._sparsifier is None and state.global_step > 0:
            raise GrowpruneError(
                "GrowPruneCallback was added after the Trainer was made, so it cannot resume a checkpoint: pass it as "
                "Trainer(callbacks=[...])"
            )
        if self._sparsifier is None:
            lengths = {"iterations": state.max_steps, "iterations_per_epoch": per_epoch}
            self._sparsifier = self._make(trainer, model, optimizer, loader=loader, **lengths)
        restarts = any(scheduled.phase.restart for scheduled in self.cursor.schedule)
        is_restarting = restarts and not self.cursor.is_over
        with self._plain_if_refused():
            self._check_place(state.max_steps, state.global_step, functools.partial(remedy, args, per_epoch))
            if is_restarting and not (type(trainer.lr_scheduler) is LambdaLR and trainer._created_lr_scheduler):
                raise GrowpruneError(
                    f"each phase of {self.settings.name} restarts the learning-rate schedule, which only works with "
                    f"the schedules of TrainingArguments, not your own: give GrowPruneCallback restart=False"
                )
            self._check_copies(callbacks)
            self.sparsifier.begin([optimizer])
        if is_restarting:
            restart_rates(args, trainer.lr_scheduler, self.cursor)
        if state.global_step == 0:  # else the checkpoint contains the last figures
            self._figures = Figures(self.cursor, by_weight=self._log_layers)
        for stopping in self._stopping():
            call_only_if(lambda: self.sparse.is_at_target, stopping, "on_evaluate")
        # put this callback first, so that loggers get its figures, and our `_Last` at the end
        others = [other for other in callbacks if other is not self and not isinstance(other, _Last)]
        callbacks[:] = [self, *others, _Last(self, trainer)]
        state.stateful_callbacks.setdefault(_Last.__name__, {})
        self._mask_copies(callbacks)
        self.is_training = True

    def _check_model(self, model: Any) -> None:
        if self._sparsifier is not None and self.sparse.model is not model:
            raise GrowpruneError("this GrowPruneCallback belongs to another model: make a new one for each model")

    def _make(self, trainer: Any, model: Any, *optimizers: Any, loader: Any = None, **how: Any) -> Sparsifier:
        how |= {"remedy": functools.partial(remedy, trainer.args, how.get("iterations_per_epoch"))}
        return Sparsifier(model, self.settings, optimizers, score=functools.partial(score, trainer, loader), **how)

    def _stopping(self) -> list[EarlyStoppingCallback]:
        return [other for other in self._others if isinstance(other, EarlyStoppingCallback)]

    # Training

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse storage="compact" if other callbacks have made copies when the training began."""
        self._check_copies(self._others)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finish the plan at the last step, if a gradient scaler has skipped steps. Mask copies after edits."""
        if not self.cursor.is_over and state.global_step >= state.max_steps:
            self.cursor.advance(self.cursor.num_iterations)
        self._mask_copies(self._others)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add our figures to the logs of the training."""
        if self._figures is not None and logs is not None and "loss" in logs:
            figures = self._figures.read()
            logs.update(figures)
            state.log_history[-1].update(figures)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait until the first process has written our state, because others may read it as the best."""
        if args.world_size > 1:
            distributed.barrier()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Warn if the training was stopped before the model is as sparse as it should be."""
        self.is_training = False
        for stopping in self._stopping():
            vars(stopping).pop("on_evaluate", None)
        self._warn_if_stopped("train(resume_from_checkpoint=True)")

    def save(self, folder: Path) -> None:
        """Add our state to a checkpoint that has the weights already."""
        weights = self.sparse.snapshot(left_out(self.sparse.model, folder))
        write_state(folder, {**self._state(), "left_out": weights})


class _Last(TrainerCallback, ExportableState):
    """The last callback, so that others see the true metric. The Trainer asks it for a state at each checkpoint."""

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
            metrics[name] = math.nan  # NaN never compares as better

    def state(self) -> dict[str, Any]:
        """Add our state to the checkpoint that is being written.

        The Trainer asks for states before it writes the file that completes a checkpoint, and before it deletes older
        checkpoints. It also asks when a training begins, but it neither saves nor stops then.
        """
        if self._callback is not None and self._callback.is_training:
            control, state = self._trainer.control, self._trainer.state
            folder = Path(self._trainer.args.output_dir) / f"checkpoint-{state.global_step}"
            if (control.should_save or control.should_training_stop) and folder.is_dir():
                self._callback.save(folder)
        return {"args": {}, "attributes": {}}


# Checks and properties of the Trainer


def calling_trainer() -> Trainer:
    """Return the Trainer whose method calls the function that calls this one, through any number of others.

    The Trainer of transformers (5.22) passes to callbacks neither itself nor anything that refers to it. But masks must
    be loaded before the weights of a checkpoint, and no event comes before them. So this looks at the functions that
    call it, once when a Trainer is made, and once when it begins to train.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    raise GrowpruneError(
        "GrowPruneCallback works only in the Trainer of transformers: give it as Trainer(callbacks=[...])"
    )


def check_trainer(trainer: Any, storage: str) -> None:
    """Raise if a Trainer cannot train a sparse model."""
    own_loop = "use DDP, or a loop of your own with sparse.shard(mesh)"
    for is_asked, what in (
        (trainer.is_fsdp_enabled, f"FSDP: {own_loop}"),
        (trainer.is_deepspeed_enabled, f"DeepSpeed: {own_loop}"),
        (
            trainer.args.auto_find_batch_size,
            "auto_find_batch_size, which trains again: set per_device_train_batch_size",
        ),
        (trainer.state.is_hyper_param_search, "hyperparameter_search(): make one Trainer per trial"),
        (trainer.args.n_gpu > 1, "DataParallel: start one process per GPU with torchrun"),
    ):
        if is_asked:
            raise GrowpruneError(f"GrowPruneCallback does not work with {what}")
    if trainer.args.world_size > 1 and storage == "compact":
        raise GrowpruneError(
            "storage='compact' does not work with DDP, since the Trainer wraps the model only once: use "
            "storage='masked'"
        )
    if isinstance(trainer.lr_scheduler, ReduceLROnPlateau) or type(trainer.lr_scheduler).__name__ == "GreedyLR":
        raise GrowpruneError(
            f"{type(trainer.lr_scheduler).__name__} reacts to the loss, which jumps when weights are pruned: choose "
            f"another lr_scheduler_type, such as 'cosine'"
        )


def score(trainer: Any, loader: Any, sparse: SparseModel, by: By) -> None:
    """Compute gradients of the batches of the first step, with the Trainer's own loss, for an edit that needs them."""

    def loss(batch: Any) -> Tensor:
        with trainer.compute_loss_context_manager():
            inputs = trainer._prepare_inputs(batch)
            found: Tensor = trainer.compute_loss(sparse.model, inputs, num_items_in_batch=num_items)
            return found

    sparse.model.train()
    count = trainer.args.gradient_accumulation_steps
    with scoring(by):
        # iterate as over a plain DataLoader, because accelerate's own keeps track of its iterators
        batches = DataLoader.__iter__(loader) if isinstance(loader, DataLoader) else iter(loader)
        first, num_items = trainer.get_batch_samples(batches, count, trainer.args.device)
        sparse.score(by, [functools.partial(loss, batch) for batch in first])


def steps_per_epoch(args: Any, loader: Any) -> int | None:
    """Return how many optimizer steps the Trainer makes in an epoch, if its data have a length."""
    try:
        num_batches = len(loader)
    except TypeError:  # an iterable dataset
        return None
    return max(1, math.ceil(num_batches / int(args.gradient_accumulation_steps)))


def remedy(args: Any, per_epoch: int | None, steps: int) -> str:
    """Return what to give a Trainer for a training of `steps` optimizer steps."""
    if args.max_steps <= 0 and per_epoch and steps % per_epoch == 0:
        return f"TrainingArguments(num_train_epochs={steps // per_epoch})"
    return f"TrainingArguments(max_steps={steps})"


# Learning rates: each phase that restarts gets a whole schedule


def restart_rates(args: Any, scheduler: Any, cursor: Cursor) -> None:
    """Give each phase that restarts the rates a whole schedule, which lasts until the next such phase."""
    bounds, step = [0], 0  # the steps where the schedule begins, and the end of the plan
    for scheduled in cursor.schedule:
        bounds += [step] if scheduled.phase.restart and step > bounds[-1] else []
        step += cursor.length_of(scheduled.phase)
    bounds.append(step)

    def of_schedule(length: int) -> Callable[[int], float]:
        nothing = SGD([nn.Parameter()], lr=args.learning_rate)
        warmup = args.get_warmup_steps(length)
        made = get_scheduler(args.lr_scheduler_type, nothing, warmup, length, args.lr_scheduler_kwargs)
        factor: Callable[[int], float] = made.lr_lambdas[0]
        return factor

    factors = [of_schedule(end - start) for start, end in itertools.pairwise(bounds)]

    def factor(step: int) -> float:
        number = min(bisect.bisect_right(bounds, step), len(factors)) - 1
        return factors[number](step - bounds[number])

    scheduler.lr_lambdas = [factor] * len(scheduler.base_lrs)
    for group, base in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
        group["lr"] = base * factor(scheduler.last_epoch)
