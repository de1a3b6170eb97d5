"""GrowPruneCallback with `auto_find_batch_size`, by which a Trainer begins anew, with less, when memory runs out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers_cases import assert_same_bits, make_data, make_model, make_trainer

from growprune import GrowpruneError
from growprune.integrations.transformers import GrowPruneCallback


class Short(hf.Trainer):
    """Runs out of memory once, when so many steps are made, after the backward pass; each try has the same batches."""

    at: int | None = None
    where = "step"

    def get_train_dataloader(self) -> Any:
        hf.set_seed(1)
        return super().get_train_dataloader()

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.memory_runs_out("loss")
        return super().compute_loss(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.memory_runs_out("step")
        return loss

    def memory_runs_out(self, where: str) -> None:
        if where == self.where and self.state.global_step == self.at:
            self.at = None
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")


EPOCHS = {"max_steps": -1, "num_train_epochs": 2, "lr_scheduler_type": "cosine"}


def train(folder: Path, method: str, *, at: int | None, where: str = "step", **given: Any) -> tuple[Any, Any]:
    storage, resume = given.pop("storage", "masked"), given.pop("resume", None)
    callback = GrowPruneCallback(method, sparsity=0.75, storage=storage)
    trainer = make_trainer(folder, make_model("gpt2"), make_data("gpt2"), callback, **{**EPOCHS, **given})
    trainer.__class__, trainer.at, trainer.where = Short, at, where
    trainer.train(resume_from_checkpoint=resume)
    return trainer, callback


@pytest.mark.parametrize(
    ("method", "storage", "where"),
    [
        ("gradual_gap", "compact", "step"),
        ("rigl", "masked", "step"),
        ("snip", "masked", "loss"),  # when the first batches are looked at
        ("snip", "masked", "step"),
        ("cyclic_gap", "masked", "step"),
    ],
)
def test_a_second_try_is_a_training_with_the_smaller_batches(
    method: str, storage: str, where: str, tmp_path: Path
) -> None:
    given = {"storage": storage, "per_device_train_batch_size": 3}
    expected, _ = train(tmp_path, method, at=None, **given)
    given = {"storage": storage, "per_device_train_batch_size": 4, "auto_find_batch_size": True}
    found, callback = train(tmp_path, method, at=0, where=where, **given)
    assert found._train_batch_size == 3 and found.state.global_step == expected.state.global_step == 12
    assert callback.cursor.iteration == 12 and callback.sparse.is_at_target
    assert_same_bits(found.model, expected.model)


def test_a_plan_that_is_under_way_is_not_begun_anew(tmp_path: Path) -> None:
    with pytest.raises(
        GrowpruneError, match=r"was interrupted at step 2 of 8, where auto_find_batch_size .*_train_batch_size=3"
    ):
        train(tmp_path, "gradual_gap", at=2, auto_find_batch_size=True)


def test_a_model_whose_plan_is_over_is_trained_on(tmp_path: Path) -> None:
    trainer, callback = train(tmp_path, "gradual_gap", at=None, auto_find_batch_size=True)
    trainer.at = 2
    trainer.train()
    assert trainer._train_batch_size == 3 and callback.sparse.is_at_target


STEPS = {"max_steps": 8, "auto_find_batch_size": True, "save_strategy": "steps", "save_steps": 3}


def test_a_training_that_is_resumed_tries_again_before_its_first_step_only(tmp_path: Path) -> None:
    train(tmp_path, "rigl", at=None, **STEPS)
    resume = f"{tmp_path}/checkpoint-3"
    _, callback = train(tmp_path, "rigl", at=3, resume=resume, **STEPS)
    assert callback.cursor.is_over and callback.sparse.is_at_target
    with pytest.raises(GrowpruneError, match="was interrupted at step 5 of 8"):
        train(tmp_path, "rigl", at=5, resume=resume, **STEPS)


def test_a_training_that_broke_off_is_resumed_in_the_same_trainer(tmp_path: Path) -> None:
    class Breaking(hf.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                raise RuntimeError("somebody tripped over a cable")

    callback, breaking = GrowPruneCallback("rigl", sparsity=0.75), Breaking()
    trainer = make_trainer(tmp_path, make_model("gpt2"), make_data("gpt2"), callback, breaking, **STEPS)
    with pytest.raises(RuntimeError, match="tripped"):
        trainer.train()
    trainer.remove_callback(breaking)
    trainer.train(resume_from_checkpoint=True)
    assert callback.cursor.is_over and callback.sparse.is_at_target
