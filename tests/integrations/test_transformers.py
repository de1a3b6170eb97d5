"""GrowPruneCallback in the Trainer of transformers: exact counts, exact resume, and what else it promises."""

import itertools
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from transformers_cases import assert_same_bits, make_data, make_model, make_trainer, train

from growprune.integrations.transformers import GrowPruneCallback
from growprune.masks.inspection import output_layers

SAVING = {"save_strategy": "steps", "save_steps": 3}


class Noting(hf.TrainerCallback):
    """Notes what other callbacks get to see."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []
        self.rates: list[float] = []
        self.is_fresh: list[bool] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any, **kwargs: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.is_fresh.append(len(optimizer.state) == 0)


@pytest.mark.parametrize(
    ("name", "method", "storage"),
    [  # each method in each storage; mixtral, whose experts the Trainer does not load, in both
        ("bert", "gradual_gap", "masked"),
        ("gpt2", "cyclic_gap", "compact"),
        ("llama", "rigl", "masked"),
        ("mixtral", "cyclic_gap", "masked"),
        ("mixtral", "rigl", "compact"),
        ("t5", "gradual_gap", "masked"),
        ("t5", "rigl", "compact"),
        ("vit", "gradual_gap", "compact"),
    ],
)
def test_a_training_ends_at_its_count_is_saved_and_resumes_to_the_same_bits(
    name: str, method: str, storage: str, tmp_path: Path
) -> None:
    trainer, callback = train(tmp_path, name, method, storage=storage, args=SAVING)
    sparse, cursor = callback.sparse, callback.cursor
    assert sparse is not None and cursor is not None and cursor.is_over
    assert sparse.num_alive * 4 == sparse.num_prunable
    weights = trainer.model.state_dict()
    assert all(not weights[name][~mask].any() for name, mask in sparse.masks.items())
    trainer.save_model(str(tmp_path / "saved"))
    assert_same_bits(type(trainer.model).from_pretrained(tmp_path / "saved"), trainer.model)

    again, resumed = train(tmp_path, name, method, storage=storage, args=SAVING, resume=f"{tmp_path}/checkpoint-3")
    assert_same_bits(again.model, trainer.model)
    assert all(torch.equal(mask, sparse.masks[name]) for name, mask in resumed.sparse.masks.items())


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("bert", ("classifier",)),
        ("gpt2", ()),  # tied to its embedding, which is never pruned
        ("llama", ("lm_head",)),
        ("mixtral", ("lm_head",)),
        ("t5", ()),  # tied as well
        ("vit", ("classifier",)),
    ],
)
def test_classifiers_and_untied_output_heads_stay_dense(name: str, kept: tuple[str, ...]) -> None:
    model, batch = make_model(name), make_data(name)[0]
    example = {key: torch.as_tensor(value).unsqueeze(0) for key, value in batch.items()}
    assert output_layers(model)[0] == kept
    assert output_layers(model, example)[0] == kept


@pytest.mark.parametrize(
    "args",
    [
        {"bf16": True},
        {"gradient_checkpointing": True},
        {"gradient_accumulation_steps": 2},
        {"torch_compile": True, "torch_compile_backend": "eager"},
        {"max_steps": -1, "num_train_epochs": 1.5},
        {"optim": "adafactor"},
    ],
    ids=lambda args: next(iter(args)),
)
def test_what_the_trainer_can_do_goes_together_with_sparsity(args: dict[str, Any], tmp_path: Path) -> None:
    trainer, callback = train(tmp_path, "bert", args={**SAVING, **args})
    sparse = callback.sparse
    assert sparse is not None and sparse.num_alive * 4 == sparse.num_prunable
    weights = trainer.model.state_dict()
    assert all(not weights[name][~mask].any() for name, mask in sparse.masks.items())
    again, _ = train(tmp_path, "bert", args={**SAVING, **args}, resume=f"{tmp_path}/checkpoint-3")
    assert_same_bits(again.model, trainer.model)


# Best models


def falling() -> Any:
    """A metric that only ever gets worse, so that the first model counts as the best."""
    scores = itertools.count(0, -1)
    return lambda prediction: {"score": next(scores)}


BEST = {
    **{"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1},
    **{"load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True},
}


@pytest.mark.parametrize("is_first", [True, False])
def test_only_a_model_at_the_target_is_the_best_and_growing_wears_no_patience(tmp_path: Path, is_first: bool) -> None:
    callback, stopping = GrowPruneCallback("cyclic_gap", sparsity=0.75), hf.EarlyStoppingCallback(2)
    callbacks = [callback, stopping] if is_first else [stopping, callback]
    trainer = make_trainer(tmp_path, make_model("bert"), make_data("bert"), *callbacks, **BEST)
    trainer.compute_metrics = falling()
    trainer.train()
    assert trainer.state.best_global_step == 4  # four steps with a part grown, then all are sparse
    assert trainer.state.global_step == 6  # two worse ones after it
    assert callback.sparse is not None and callback.sparse.is_at_target
    assert_same_bits(hf.BertForSequenceClassification.from_pretrained(tmp_path / "checkpoint-4"), trainer.model)


@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.parametrize("name", ["bert", "mixtral"])
def test_the_best_model_comes_with_its_own_masks(name: str, storage: str, tmp_path: Path) -> None:
    callback = GrowPruneCallback("rigl", sparsity=0.75, storage=storage)
    trainer = make_trainer(tmp_path, make_model(name), make_data(name), callback, **{**BEST, "max_steps": 4})
    trainer.compute_metrics = falling()
    trainer.train()
    assert trainer.state.best_global_step == 1
    assert_same_bits(type(trainer.model).from_pretrained(tmp_path / "checkpoint-1"), trainer.model)
    sparse, weights = callback.sparse, trainer.model.state_dict()
    assert sparse is not None and sparse.is_at_target
    assert all(not weights[name][~mask].any() for name, mask in sparse.masks.items())


class Chatty(hf.Trainer):
    """Logs in every step what the Trainer itself logs at the end."""

    name = "train_loss"

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.log({self.name: float(loss), "train_runtime": 1.0})
        return loss


class Seeing(hf.TrainerCallback):
    """Sees the masks after each step."""

    def __init__(self, callback: GrowPruneCallback) -> None:
        self._callback = callback
        self.masks: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.masks.append({name: mask.clone() for name, mask in self._callback.sparse.masks.items()})


def test_a_loss_that_a_trainer_logs_by_itself_does_not_bring_the_best_masks_back(tmp_path: Path) -> None:
    seen = []
    for kind in (hf.Trainer, Chatty):
        callback = GrowPruneCallback("rigl", sparsity=0.75, every=1)
        seeing = Seeing(callback)
        trainer = make_trainer(tmp_path, make_model("bert"), make_data("bert"), callback, seeing, **BEST)
        trainer.__class__, trainer.compute_metrics = kind, falling()
        trainer.train()
        assert trainer.state.best_global_step == 1
        seen.append(seeing.masks)
    for step, (one, other) in enumerate(zip(*seen, strict=True), 1):
        assert [name for name in one if not torch.equal(one[name], other[name])] == [], step
    assert any(not torch.equal(seen[0][0][name], mask) for name, mask in seen[0][-1].items())  # they do change


# Logs and learning rates


def test_figures_are_logged_before_other_callbacks_look(tmp_path: Path) -> None:
    noting = Noting()
    callback = GrowPruneCallback("gradual_gap", sparsity=0.75, every=2, grow_until=1.0, log_layers=True)
    logging = {"logging_strategy": "steps", "logging_steps": 1}
    trainer = make_trainer(tmp_path, make_model("vit"), make_data("vit"), noting, callback, **logging)
    trainer.train()
    steps = [log for log in noting.logs if "loss" in log]
    assert [log["phase"] for log in steps] == [1, 2, 2, 3, 3, 4, 4, 4]
    assert [log["churn"] > 0 for log in steps] == [False, True, False, True, False, False, False, False]
    assert steps[-1]["sparsity"] == 0.75
    assert steps[-1]["live_weights"] * 4 == callback.sparse.num_prunable
    assert sum(key.startswith("density/") for key in steps[-1]) == len(callback.sparse.weights)
    history = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["live_weights"] for log in history] == [log["live_weights"] for log in steps]


@pytest.mark.parametrize(
    ("restart", "factors"),
    [(True, [1, 0.5, 1, 0.5, 1, 0.75, 0.5, 0.25]), (False, [1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125])],
)
def test_phases_that_restart_have_a_fresh_optimizer_and_the_whole_schedule(
    restart: bool, factors: list[float], tmp_path: Path
) -> None:
    def noted(resume: str | None) -> Noting:
        lengths = {"steps": 2, "epochs": 1, "finetune": 2, "iterations_per_epoch": 2}
        callback = GrowPruneCallback("cyclic_gap", sparsity=0.75, parts=2, restart=restart, **lengths)
        trainer = make_trainer(tmp_path, make_model("bert"), make_data("bert"), callback, noting := Noting(), **SAVING)
        trainer.train(resume_from_checkpoint=resume)
        return noting

    whole, resumed = noted(None), noted(f"{tmp_path}/checkpoint-3")
    assert whole.rates == [0.01 * factor for factor in factors]
    assert resumed.rates == whole.rates[3:]
    assert [i for i, is_fresh in enumerate(whole.is_fresh) if is_fresh] == ([0, 2, 4] if restart else [0])


# Going on


def test_steps_that_a_gradient_scaler_skips_do_not_count_and_the_plan_ends_all_the_same(tmp_path: Path) -> None:
    model = make_model("bert")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step, calls = optimizer.step, itertools.count()
    optimizer.step = lambda *args: None if next(calls) == 2 else step(*args)  # type: ignore[method-assign]
    callback = GrowPruneCallback("gradual_gap", sparsity=0.75, until=1.0)
    noting = Noting()
    logging = {"logging_strategy": "steps", "logging_steps": 1}
    trainer = make_trainer(
        tmp_path, model, make_data("bert"), noting, callback, optimizers=(optimizer, None), **logging
    )
    trainer.train()
    assert [log["phase"] for log in noting.logs if "loss" in log] == [2, 3, 3, 4, 5, 6, 7, 9]
    assert callback.cursor is not None and callback.cursor.is_over
    assert callback.sparse is not None and callback.sparse.num_alive * 4 == callback.sparse.num_prunable


def test_a_second_training_goes_on_with_the_masks_of_the_first(tmp_path: Path) -> None:
    trainer, callback = train(tmp_path, "bert")
    masks, weights = callback.sparse.masks, {k: v.clone() for k, v in trainer.model.state_dict().items()}
    trainer.args.max_steps = 3
    trainer.train()
    after = trainer.model.state_dict()
    assert all(torch.equal(mask, callback.sparse.masks[name]) for name, mask in masks.items())
    assert all(not after[name][~mask].any() for name, mask in masks.items())
    assert not all(torch.equal(after[name], weights[name]) for name in masks)


def test_the_same_trainer_resumes_after_it_has_gone_on(tmp_path: Path) -> None:
    trainer, callback = train(tmp_path, "bert", args=SAVING)
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    trainer.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-3")
    assert all(torch.equal(before[k], v) for k, v in trainer.model.state_dict().items())
    assert callback.cursor is not None and callback.cursor.is_over


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_adapters_of_peft_stay_dense_and_what_is_pruned_below_them_is_resumed(storage: str, tmp_path: Path) -> None:
    def adapted(resume: str | None) -> tuple[hf.Trainer, GrowPruneCallback]:
        config = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
        callback = GrowPruneCallback("gradual_gap", sparsity=0.75, storage=storage)
        model = peft.get_peft_model(make_model("bert"), config)
        trainer = make_trainer(tmp_path, model, make_data("bert"), callback, **SAVING)
        trainer.train(resume_from_checkpoint=resume)
        return trainer, callback

    trainer, callback = adapted(None)
    assert not [weight.name for weight in callback.sparse.weights if "lora" in weight.name]
    again, _ = adapted(f"{tmp_path}/checkpoint-3")
    assert_same_bits(again.model, trainer.model)


def test_the_state_in_a_checkpoint_is_safetensors_and_json(tmp_path: Path) -> None:
    train(tmp_path, "bert", args=SAVING)
    ours = tmp_path / "checkpoint-3" / "growprune" / "00000000"
    assert sorted(file.name for file in ours.iterdir()) == ["COMPLETE", "state.json", "tensors.safetensors"]
    assert load_file(ours / "tensors.safetensors")


def test_layers_that_are_called_several_times_grow_the_same_weights_in_both_storages(tmp_path: Path) -> None:
    sizes = {"vocab_size": 32, "embedding_size": 8, "hidden_size": 16, "intermediate_size": 32}
    config = hf.AlbertConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, num_labels=3)
    masks = []
    for storage in ("masked", "compact"):
        torch.manual_seed(0)
        callback = GrowPruneCallback("rigl", sparsity=0.75, storage=storage)
        make_trainer(tmp_path, hf.AlbertForSequenceClassification(config), make_data("bert"), callback).train()
        masks.append(callback.sparse.masks)
    assert all(torch.equal(mask, masks[1][name]) for name, mask in masks[0].items())
