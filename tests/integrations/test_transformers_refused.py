"""What GrowPruneCallback refuses, in one line each, and says what to do."""

import importlib
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers_cases import make_data, make_model, make_trainer, train

from growprune import GrowpruneError
from growprune.integrations.callback import call_first
from growprune.integrations.transformers import GrowPruneCallback, calling_trainer, check_trainer

SAVING = {"save_strategy": "steps", "save_steps": 3}


@pytest.mark.parametrize(
    ("given", "args", "message"),
    [
        (
            {"method": "cyclic_gap", "steps": 2, "epochs": 1, "finetune": 1},
            {},
            r"the plan of cyclic_gap has 12 optimizer steps \(steps=2, epochs=1, finetune=1\), but the training has 8:"
            r" set TrainingArguments\(max_steps=12\), or use options of cyclic_gap that add up to 8",
        ),
        (
            {"method": "cyclic_gap", "steps": 2, "epochs": 1, "finetune": 1},
            {"max_steps": -1, "num_train_epochs": 2},
            r"has 12 optimizer steps .* training has 8: set TrainingArguments\(num_train_epochs=3\)",
        ),
        ({"method": "grasp", "storage": "compact"}, {}, "by=grasp needs dense tensors .*: use storage='masked'"),
        (
            {"method": "rigl"},
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 4},
            "ReduceLROnPlateau reacts to the loss, .*: choose another lr_scheduler_type, such as 'cosine'",
        ),
    ],
)
def test_a_training_that_cannot_be_is_refused_before_any_weight_is_lost(
    given: dict[str, Any], args: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = make_model("bert")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = make_trainer(tmp_path, model, make_data("bert"), GrowPruneCallback(**{"sparsity": 0.9, **given}), **args)
    with pytest.raises(GrowpruneError, match=message):
        trainer.train()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_without_transformers_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "growprune.integrations.transformers")
    with pytest.raises(GrowpruneError, match=r"\[transformers\]"):
        importlib.import_module("growprune.integrations.transformers")


@pytest.mark.parametrize(
    ("about", "args", "match"),
    [
        ({"is_fsdp_enabled": True}, {}, "FSDP: use DDP"),
        ({"is_deepspeed_enabled": True}, {}, "DeepSpeed: use DDP"),
        ({}, {"auto_find_batch_size": True}, "auto_find_batch_size.* set per_device_train_batch_size"),
        ({}, {"n_gpu": 2}, "DataParallel"),
        ({}, {"world_size": 2}, "storage='compact' does not work with DDP"),
    ],
)
def test_trainers_that_cannot_train_sparse_models_are_refused(
    about: dict[str, Any], args: dict[str, Any], match: str
) -> None:
    usual = {"auto_find_batch_size": False, "n_gpu": 1, "world_size": 1}
    fine = {"is_fsdp_enabled": False, "is_deepspeed_enabled": False, "lr_scheduler": None}
    state = SimpleNamespace(is_hyper_param_search=False)
    trainer = SimpleNamespace(**{**fine, **about}, state=state, args=SimpleNamespace(**{**usual, **args}))
    with pytest.raises(GrowpruneError, match=match):
        check_trainer(trainer, "compact")


def test_a_second_try_with_smaller_batches_is_refused_when_the_trainer_is_made(tmp_path: Path) -> None:
    callback = GrowPruneCallback(sparsity=0.9)
    with pytest.raises(GrowpruneError, match="auto_find_batch_size"):
        make_trainer(tmp_path, make_model("bert"), make_data("bert"), callback, auto_find_batch_size=True)


def test_a_schedule_of_ones_own_is_not_restarted(tmp_path: Path) -> None:
    model = make_model("bert")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    own = (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
    for restart in (True, False):
        callback = GrowPruneCallback("cyclic_gap", sparsity=0.9, restart=restart)
        trainer = make_trainer(tmp_path, model, make_data("bert"), callback, optimizers=own)
        if not restart:
            trainer.train()
            continue
        with pytest.raises(GrowpruneError, match="each phase of cyclic_gap restarts the learning-rate schedule"):
            trainer.train()


@pytest.mark.parametrize("checkpoint", [None, "checkpoint-3"])
def test_a_callback_is_for_one_model(checkpoint: str | None, tmp_path: Path) -> None:
    _, callback = train(tmp_path, "bert", args=SAVING)
    before = callback.sparse.masks
    other = make_trainer(tmp_path, make_model("bert", seed=1), make_data("bert"), callback)
    with pytest.raises(GrowpruneError, match="belongs to another model: make a new one for each model"):
        other.train(resume_from_checkpoint=checkpoint and str(tmp_path / checkpoint))
    assert callback.cursor.is_over
    assert all(torch.equal(mask, before[name]) for name, mask in callback.sparse.masks.items())


def test_two_callbacks_are_refused_before_any_weight_is_lost(tmp_path: Path) -> None:
    model = make_model("bert")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    both = GrowPruneCallback("gmp", sparsity=0.75), GrowPruneCallback("rigl", sparsity=0.5)
    with pytest.raises(GrowpruneError, match="has 2 GrowPruneCallbacks, but a model follows one plan: keep one"):
        make_trainer(tmp_path, model, make_data("bert"), *both).train()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("method", "by"), [("rigl", "gradient"), ("snfs", "momentum"), ("snip", "snip")])
def test_weights_that_are_frozen_are_named_as_why_there_are_no_gradients(method: str, by: str, tmp_path: Path) -> None:
    lora = peft.LoraConfig(target_modules=["query"], r=2, task_type="SEQ_CLS")
    model = peft.get_peft_model(make_model("bert"), lora)
    trainer = make_trainer(tmp_path, model, make_data("bert"), GrowPruneCallback(method, sparsity=0.75))
    with pytest.raises(GrowpruneError, match=f"by {by} needs gradients, but all prunable weights are frozen"):
        trainer.train()


@pytest.mark.parametrize(
    ("given", "args", "message"),
    [
        ({"storage": "compact"}, {}, "storage='masked', but this training has storage='compact': resume with"),
        ({"method": "set"}, {}, "method='rigl', but this Sparsifier has method='set': resume with"),
        ({"every": 3}, {}, "of another plan: resume with"),
        ({"keep_dense": []}, {}, "use the same keep_dense"),
        ({}, {"max_steps": 9}, r"has 8 optimizer steps, but the Trainer makes 9: set .*max_steps=8"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(
    given: dict[str, Any], args: dict[str, Any], message: str, tmp_path: Path
) -> None:
    train(tmp_path, "bert", args=SAVING)
    with pytest.raises(GrowpruneError, match=message):
        train(tmp_path, "bert", resume=f"{tmp_path}/checkpoint-3", args={**SAVING, **args}, **given)


def test_a_checkpoint_whose_weights_are_of_another_moment_is_refused(tmp_path: Path) -> None:
    train(tmp_path, "bert", args=SAVING)
    shutil.copy(tmp_path / "checkpoint-6" / "model.safetensors", tmp_path / "checkpoint-3")
    with pytest.raises(GrowpruneError, match=r"disagree with the masks .* non-zero where the mask prunes"):
        train(tmp_path, "bert", args=SAVING, resume=f"{tmp_path}/checkpoint-3")


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    train(tmp_path, "bert", args=SAVING)
    file = tmp_path / "checkpoint-3" / "growprune" / "00000000" / "tensors.safetensors"
    save_file({name: tensor * 0 for name, tensor in load_file(file).items()}, file)
    with pytest.raises(GrowpruneError, match=r"is damaged: tensors.safetensors has changed since it was written"):
        train(tmp_path, "bert", args=SAVING, resume=f"{tmp_path}/checkpoint-3")


class Stopping(hf.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop |= state.global_step == 2
        return control


def test_a_training_that_stops_too_early_says_so_is_evaluated_and_begins_no_second_time(tmp_path: Path) -> None:
    callbacks = GrowPruneCallback("gradual_gap", sparsity=0.75), Stopping()
    trainer = make_trainer(tmp_path, make_model("bert"), make_data("bert"), *callbacks, metric_for_best_model="loss")
    with pytest.warns(UserWarning, match=r"ended at step 2 of 8 of the plan, at sparsity 0.4 \(target 0.75\)"):
        trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    with pytest.raises(GrowpruneError, match="the plan is at step 2 of 8"):
        trainer.train()


@pytest.mark.parametrize("name", ["sparse", "cursor"])
def test_a_callback_has_no_model_before_the_training(name: str) -> None:
    with pytest.raises(GrowpruneError, match=r"^GrowPruneCallback has no model yet"):
        getattr(GrowPruneCallback(sparsity=0.9), name)


def test_a_trainer_that_loads_in_another_way_is_refused() -> None:
    with pytest.raises(GrowpruneError, match=r"^object has no method _load_best_model: install a version"):
        call_first(object(), "_load_best_model", print)


def test_a_callback_that_is_called_by_no_trainer_is_refused() -> None:
    with pytest.raises(GrowpruneError, match=r"works only in the Trainer of transformers"):
        calling_trainer()


def test_a_callback_finds_the_trainer_that_calls_it(tmp_path: Path) -> None:
    class Finding(hf.TrainerCallback):
        def on_init_end(self, *args: Any, **kwargs: Any) -> None:
            self.found = [calling_trainer()]

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.found.append((lambda: calling_trainer())())

    class Derived(hf.Trainer):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            return super().train(*args, **kwargs)

    other = make_trainer(tmp_path, make_model("bert"), make_data("bert"))
    trainer = Derived(make_model("bert"), other.args, train_dataset=make_data("bert"), callbacks=[finding := Finding()])
    trainer.train()
    assert finding.found == [trainer, trainer]


def test_a_callback_that_was_added_later_trains_but_does_not_resume(tmp_path: Path) -> None:
    def make() -> tuple[hf.Trainer, GrowPruneCallback]:
        trainer = make_trainer(tmp_path, make_model("bert"), make_data("bert"), **SAVING)
        trainer.add_callback(callback := GrowPruneCallback("rigl", sparsity=0.75))
        return trainer, callback

    trainer, callback = make()
    trainer.train()
    assert callback.sparse.is_at_target
    with pytest.raises(GrowpruneError, match=r"added after the Trainer was made.* Trainer\(callbacks="):
        make()[0].train(resume_from_checkpoint=f"{tmp_path}/checkpoint-3")
