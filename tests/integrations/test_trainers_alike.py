"""What both trainers do alike: figures after a resume, early stopping, training on, and models that are trained."""

import itertools
from pathlib import Path
from typing import Any

import pytest

pl = pytest.importorskip("lightning.pytorch")

import transformers as hf  # noqa: E402
from lightning.pytorch.callbacks import EarlyStopping  # noqa: E402
from lightning_cases import QUIET, Loader, Module, every, fit  # noqa: E402
from transformers_cases import make_data, make_model, make_trainer, train  # noqa: E402

from growprune.integrations.lightning import GrowPrune  # noqa: E402
from growprune.integrations.transformers import GrowPruneCallback  # noqa: E402

pytestmark = QUIET
FIGURES = ("sparsity", "live_weights", "phase", "churn")


# Figures after a resume


@pytest.mark.parametrize(("method", "options"), [("rigl", {"every": 2}), ("deepr", {"temperature": 0.1})])
def test_transformers_logs_the_same_figures_after_a_resume(
    method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    args = {"logging_strategy": "steps", "logging_steps": 4, "save_strategy": "steps", "save_steps": 3}
    whole, _ = train(tmp_path, "gpt2", method, args=args, **options)
    again, _ = train(tmp_path, "gpt2", method, args=args, resume=f"{tmp_path}/checkpoint-3", **options)
    rows, later = (
        [{n: log[n] for n in FIGURES} for log in t.state.log_history if "loss" in log] for t in (whole, again)
    )
    assert later == rows
    assert rows[0]["churn"] > 0


class Noting(pl.Callback):
    """Notes what is logged after each step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen.append({name: float(trainer.callback_metrics[name]) for name in FIGURES})


@pytest.mark.parametrize(("method", "options"), [("rigl", {"every": 4}), ("deepr", {"temperature": 0.1})])
def test_lightning_logs_the_same_figures_after_a_resume(method: str, options: dict[str, Any], tmp_path: Path) -> None:
    def figures(**how: Any) -> list[dict[str, float]]:
        noting, callback = Noting(), GrowPrune(method, sparsity=0.9, **options)
        fit(tmp_path, callback, callbacks=[noting, every(tmp_path, 1)], log_every_n_steps=3, **how)
        return noting.seen

    whole = figures()
    assert {row["churn"] > 0 for row in whole} == {False, True}
    for step in (5, 7):
        assert figures(ckpt=tmp_path / f"step={step}.ckpt") == whole[step:]


# Early stopping: 10 epochs, a loss that rises with every epoch, and a patience of 2

STOPPED: dict[str, tuple[dict[str, Any], int]] = {
    "gradual_gap": ({"until": 0.5, "grow_until": 1.0}, 7),  # at the target from the end of epoch 5, then two worse ones
    "acdc": ({}, 5),  # at the target at the end of epochs 1, 3 and 5, dense between them
    "rigl": ({}, 3),  # always at the target
}


class Rising(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(self.current_epoch))


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("method", STOPPED)
def test_early_stopping_in_lightning_counts_evaluations_at_the_target(
    method: str, is_first: bool, tmp_path: Path
) -> None:
    options, num_epochs = STOPPED[method]
    callback, stopping = GrowPrune(method, sparsity=0.75, every=6, **options), EarlyStopping("val_loss", patience=2)
    trainer = pl.Trainer(
        max_epochs=10,
        callbacks=[callback, stopping] if is_first else [stopping, callback],
        **{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"},
    )
    module = Rising()
    trainer.fit(module, Loader(), Loader(1))
    assert trainer.global_step == 6 * num_epochs
    assert trainer.current_epoch == num_epochs
    assert not {"on_train_epoch_end", "on_validation_end"} & vars(stopping).keys()


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("method", STOPPED)
def test_early_stopping_in_transformers_counts_evaluations_at_the_target(
    method: str, is_first: bool, tmp_path: Path
) -> None:
    options, num_epochs = STOPPED[method]
    callback = GrowPruneCallback(method, sparsity=0.75, every=4, **options)
    stopping, scores = hf.EarlyStoppingCallback(2), itertools.count()
    how = {"max_steps": -1, "num_train_epochs": 10, "eval_strategy": "epoch", "metric_for_best_model": "score"}
    callbacks = [callback, stopping] if is_first else [stopping, callback]
    trainer = make_trainer(tmp_path, make_model("bert"), make_data("bert"), *callbacks, **how, greater_is_better=False)
    trainer.compute_metrics = lambda prediction: {"score": float(next(scores))}
    trainer.train()
    assert trainer.state.global_step == 4 * num_epochs
    assert "on_evaluate" not in vars(stopping)
