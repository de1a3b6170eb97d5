"""What GrowPruneCallback refuses, in one line each, and says what to do."""

from __future__ import annotations

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
from growprune.integrations import transformers_sharded
from growprune.integrations.transformers import GrowPruneCallback

SAVING = {"save_strategy": "steps", "save_steps": 3}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "cyclic_gab"}, "there is no method 'cyclic_gab'; similar: cyclic_gap"),
        ({"method": "GaP"}, "there is no method 'GaP'; similar: gradual_gap, parallel_gradual_gap, cyclic_gap"),
        ({"method": "zzz"}, "there is no method 'zzz'; available: gradual_gap"),
        ({"method": None}, "there is no method None; "),
        ({"method": "rigl", "sparsty": 0.5}, "rigl takes no option 'sparsty': did you mean sparsity?"),
        ({"iterations_per_epoch": 0}, "iterations_per_epoch must be an integer >= 1, got 0"),
        ({"method": "rigl", "evry": 3}, "rigl takes no option 'evry': did you mean every?"),
        ({"method": "dense", "tea": 3}, "dense takes no option 'tea': it takes small"),
        ({"sparsity": 1.0}, r"sparsity must be in .0, 1., got 1.0"),
        ({"storage": "small"}, "storage must be one of masked, compact, got 'small'"),
    ],
)
def test_a_wrong_setting_is_refused_when_the_callback_is_made(given: dict[str, Any], message: str) -> None:
    with pytest.raises(GrowpruneError, match=message.replace("?", r"\?")):
        GrowPruneCallback(**{"sparsity": 0.9, **given})


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
        ({"method": "rigl", "iterations": 100}, {}, r"has 100 optimizer steps .* but the training has 8"),
        (
            {"method": "parallel_gap"},
            {},
            "parallel_gap trains branches on several machines, which a single loop cannot do",
        ),
        (
            {"method": "grasp", "storage": "compact"},
            {},
            "by=grasp needs dense tensors .*: use storage='masked'",
        ),
        ({"parts": "round"}, {}, r"parts must be a number, contiguous\(4\), balanced\(4\), per_layer.*, got 'round'"),
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
    with pytest.raises(GrowpruneError, match=r"pip install 'growprune\[transformers\]'"):
        importlib.import_module("growprune.integrations.transformers")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"deepspeed": "config.json", "fsdp": None}, "does not work with DeepSpeed, which .*: use FSDP2 with"),
        ({"deepspeed": None, "fsdp": True, "fsdp_plugin_args": {"fsdp_version": 1}}, "with FSDP1, .*: use FSDP2 with"),
        (
            {"deepspeed": None, "fsdp": True, "fsdp_plugin_args": {"fsdp_version": 2}},
            "with FSDP needs storage='compact', got 'masked': give",
        ),
    ],
)
def test_sharding_that_cannot_work_is_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(GrowpruneError, match=message):
        GrowPruneCallback(sparsity=0.9).on_init_end(SimpleNamespace(**args), None, None)


def test_smaller_batches_are_not_tried_with_a_model_that_is_sharded() -> None:
    plugin = SimpleNamespace(fsdp_version=2, activation_checkpointing=False)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    trainer = SimpleNamespace(accelerator=accelerator, args=SimpleNamespace(auto_find_batch_size=True), model=None)
    with pytest.raises(GrowpruneError, match=r"with FSDP and auto_find_batch_size, .*: give per_device_"):
        transformers_sharded.check_trainer(trainer)
    trainer.args.auto_find_batch_size = False
    transformers_sharded.check_trainer(trainer)


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


def test_a_callback_is_for_one_model(tmp_path: Path) -> None:
    _, callback = train(tmp_path, "bert")
    other = make_trainer(tmp_path, make_model("bert", seed=1), make_data("bert"), callback)
    with pytest.raises(GrowpruneError, match="belongs to another model: make a new one for each model"):
        other.train()


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


def test_a_checkpoint_without_our_state_is_named(tmp_path: Path) -> None:
    make_trainer(tmp_path, make_model("bert"), make_data("bert"), **SAVING).train()
    with pytest.raises(GrowpruneError, match="checkpoint-3 has no complete folder 'growprune': it was saved without"):
        train(tmp_path, "bert", resume=f"{tmp_path}/checkpoint-3")


@pytest.mark.parametrize(
    ("given", "args", "message"),
    [
        ({"storage": "compact"}, {}, "trained with storage='masked', but GrowPruneCallback has storage='compact': res"),
        ({"method": "set"}, {}, "trained with method='rigl', but GrowPruneCallback has method='set': resume with"),
        (
            {"every": 3},
            {},
            "belongs to another plan of rigl: give GrowPruneCallback the same options, parts",
        ),
        (
            {"keep_dense": []},
            {},
            "belongs to another plan of rigl: .* keep_dense, include and initial_mask as",
        ),
        ({}, {"max_steps": 9}, r"a training of 8 optimizer steps, but the Trainer makes 9: set .*max_steps=8"),
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
    with pytest.raises(GrowpruneError, match="has non-zero weights that the mask in the checkpoint prunes"):
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


def test_a_training_that_stops_too_early_says_so_and_begins_no_second_time(tmp_path: Path) -> None:
    callback = GrowPruneCallback("gradual_gap", sparsity=0.75)
    trainer = make_trainer(tmp_path, make_model("bert"), make_data("bert"), callback, Stopping())
    with pytest.warns(
        UserWarning, match=r"ended at step 2 of 8 of the plan, at sparsity 0.4589 \(target 0.75\): resume with"
    ):
        trainer.train()
    with pytest.raises(GrowpruneError, match="the plan is at step 2 of 8"):
        trainer.train()


def test_a_model_that_is_not_at_the_target_can_still_be_evaluated(tmp_path: Path) -> None:
    callback = GrowPruneCallback("gradual_gap", sparsity=0.75)
    trainer = make_trainer(
        tmp_path, make_model("bert"), make_data("bert"), callback, Stopping(), metric_for_best_model="loss"
    )
    with pytest.warns(UserWarning, match="ended at step 2"):
        trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.parametrize("name", ["sparse", "cursor"])
def test_a_callback_has_no_model_before_the_training(name: str) -> None:
    with pytest.raises(
        GrowpruneError, match=r"^GrowPruneCallback has no model yet: it gets one when the trainer starts to train"
    ):
        getattr(GrowPruneCallback(sparsity=0.9), name)


def test_a_trainer_that_loads_in_another_way_is_refused_and_not_left_with_other_masks() -> None:
    from growprune.integrations.transformers_trainer import take_over

    class Other:
        pass

    with pytest.raises(
        GrowpruneError, match=r"^this Trainer has no method _load_best_model: install a version of transformers"
    ):
        take_over(Other(), "_load_best_model", print)


def test_a_layer_that_is_called_several_times_is_told_how_edits_by_gradient_work(tmp_path: Path) -> None:
    sizes = {"vocab_size": 32, "embedding_size": 8, "hidden_size": 16, "intermediate_size": 32}
    config = hf.AlbertConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, num_labels=3)
    for storage in ("masked", "compact"):
        callback = GrowPruneCallback("rigl", sparsity=0.75, storage=storage)
        model = hf.AlbertForSequenceClassification(config)
        trainer = make_trainer(tmp_path, model, make_data("bert"), callback)
        if storage == "masked":
            trainer.train()
            assert callback.sparse.is_at_target
        else:
            with pytest.raises(GrowpruneError, match=r"a second gradient .* or use storage='masked'$"):
                trainer.train()
