"""Which checkpoints of a Trainer can be resumed from, whenever it was stopped."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers_cases import assert_same_bits, make_data, make_model, make_trainer, train

from growprune import GrowpruneError
from growprune.integrations import transformers
from growprune.integrations.transformers import GrowPruneCallback, last_checkpoint

SAVING = {"save_strategy": "steps", "save_steps": 3}


def test_the_last_checkpoint_is_the_newest_that_was_written_to_its_end(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "nothing yet") is None
    train(tmp_path, "bert", args={"max_steps": 10, "save_strategy": "steps", "save_steps": 5})
    (tmp_path / "checkpoint-11").mkdir()
    (tmp_path / "checkpoint-old").mkdir()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    state = tmp_path / "checkpoint-10" / "trainer_state.json"
    state.write_text(state.read_text()[:100])
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")
    (tmp_path / "checkpoint-5" / "growprune").rename(tmp_path / "elsewhere")
    assert last_checkpoint(tmp_path) is None


def test_a_checkpoint_that_lacks_our_state_alone_is_refused_with_what_to_do(tmp_path: Path) -> None:
    train(tmp_path, "bert", args=SAVING)
    shutil.rmtree(tmp_path / "checkpoint-8" / "growprune")
    with pytest.raises(GrowpruneError, match=r"checkpoint-8 has no complete folder.*last_checkpoint\(output_dir\)"):
        train(tmp_path, "bert", args=SAVING, resume=True)


def test_our_state_is_written_before_older_checkpoints_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = train(tmp_path / "whole", "bert")
    write = transformers.write_state

    def killed_at_6(folder: Path, state: dict[str, Any]) -> None:
        if folder.name == "checkpoint-6":
            raise KeyboardInterrupt
        write(folder, state)

    only_one = {**SAVING, "save_total_limit": 1}
    monkeypatch.setattr(transformers, "write_state", killed_at_6)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, "bert", args=only_one)
    monkeypatch.undo()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-3")
    resumed, _ = train(tmp_path, "bert", args=only_one, resume=last_checkpoint(tmp_path))
    assert_same_bits(resumed.model, whole.model)


class Terminating(hf.TrainerCallback):
    """Does what SIGTERM does, three seconds after it."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            self.manager.is_checkpoint_requested = True


@pytest.mark.filterwarnings("ignore:the training ended at step")
def test_a_checkpoint_that_the_trainer_makes_when_it_is_terminated_has_our_state(tmp_path: Path) -> None:
    whole, _ = train(tmp_path / "whole", "bert")
    terminating, args = Terminating(), {"enable_jit_checkpoint": True}
    callback = GrowPruneCallback("rigl", sparsity=0.75)
    trainer = make_trainer(tmp_path, make_model("bert"), make_data("bert"), terminating, callback, **args)
    terminated = next(c for c in trainer.callback_handler.callbacks if isinstance(c, JITCheckpointCallback))
    terminating.manager = terminated.jit_manager  # type: ignore[attr-defined]
    trainer.train()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    resumed, _ = train(tmp_path, "bert", resume=last_checkpoint(tmp_path))
    assert_same_bits(resumed.model, whole.model)


def test_a_second_training_writes_nothing_into_checkpoints_of_the_first(tmp_path: Path) -> None:
    class Failing(hf.TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                raise RuntimeError("out of memory")

    callback = GrowPruneCallback("rigl", sparsity=0.75)
    trainer = make_trainer(tmp_path, make_model("bert"), make_data("bert"), callback, Failing(), **SAVING)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    ours = tmp_path / "checkpoint-3" / "growprune" / "00000000" / "state.json"
    before = ours.read_bytes()
    with pytest.raises(GrowpruneError, match="the plan is at step 4 of 8"):
        trainer.train()
    assert ours.read_bytes() == before


def test_callbacks_whose_state_the_trainer_restores_do_not_disturb(tmp_path: Path) -> None:
    args = {**SAVING, "restore_callback_states_from_checkpoint": True}
    whole, _ = train(tmp_path, "bert", args=args)
    before = {name: tensor.clone() for name, tensor in whole.model.state_dict().items()}
    again, _ = train(tmp_path, "bert", args=args, resume=f"{tmp_path}/checkpoint-3")
    assert_same_bits(again.model, whole.model)
    whole.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-3")  # whose callbacks have our last one among them
    assert all(torch.equal(before[name], tensor) for name, tensor in whole.model.state_dict().items())


class Stopping(hf.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == 5


@pytest.mark.filterwarnings("ignore:the training ended at step")
@pytest.mark.parametrize(("method", "storage"), [("gradual_gap", "masked"), ("rigl", "compact")])
def test_the_same_trainer_goes_on_and_back_to_older_checkpoints(method: str, storage: str, tmp_path: Path) -> None:
    whole, _ = train(tmp_path / "whole", "gpt2", method, storage=storage)
    callback, stopping = GrowPruneCallback(method, sparsity=0.75, storage=storage), Stopping()
    trainer = make_trainer(tmp_path, make_model("gpt2"), make_data("gpt2"), callback, stopping, **SAVING)
    trainer.train()
    trainer.remove_callback(stopping)
    for checkpoint in (True, f"{tmp_path}/checkpoint-6", f"{tmp_path}/checkpoint-3", f"{tmp_path}/checkpoint-8"):
        trainer.train(resume_from_checkpoint=checkpoint)
        assert callback.sparse.is_at_target
        assert_same_bits(trainer.model, whole.model)


def test_a_second_trainer_goes_on_with_a_compact_model_whose_callback_it_is_given(tmp_path: Path) -> None:
    whole, callback = train(tmp_path, "gpt2", storage="compact", args=SAVING)
    before = {name: tensor.clone() for name, tensor in whole.model.state_dict().items()}
    again = make_trainer(tmp_path, whole.model, make_data("gpt2"), callback, **SAVING)
    again.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-3")
    assert all(torch.equal(before[name], tensor) for name, tensor in again.model.state_dict().items())


def test_a_checkpoint_without_our_state_leaves_a_compact_model_as_it_is(tmp_path: Path) -> None:
    trainer, callback = train(tmp_path, "gpt2", storage="compact", args=SAVING)
    shutil.rmtree(tmp_path / "checkpoint-3" / "growprune")
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    with pytest.raises(GrowpruneError, match="checkpoint-3 has no complete folder"):
        trainer.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-3")
    assert callback.sparse.is_at_target
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_rates_that_follow_density_are_resumed_and_logged_as_the_trainers(storage: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"storage": storage, "lr_scaling": 1.0}
    plain, _ = train(tmp_path / "plain", "bert", "gradual_gap", storage=storage, lr_scaling=0)
    whole, callback = train(tmp_path / "whole", "bert", "gradual_gap", args=SAVING, **given)
    assert whole.optimizer is not None and plain.optimizer is not None
    mine, theirs = ([group["lr"] for group in t.optimizer.param_groups] for t in (whole, plain))
    assert mine == theirs
    resumed, _ = train(
        tmp_path / "whole", "bert", "gradual_gap", args=SAVING, resume=str(tmp_path / "whole" / "checkpoint-3"), **given
    )
    assert_same_bits(resumed.model, whole.model)
    layer = next(iter(callback.sparse.masks))
    assert not torch.equal(whole.model.state_dict()[layer], plain.model.state_dict()[layer])
    with pytest.raises(GrowpruneError, match=r"lr_scaling=1\.0, but this Sparsifier has lr_scaling=0\.0"):
        train(tmp_path / "whole", "bert", "gradual_gap", args=SAVING, resume=True, storage=storage, lr_scaling=0)
    automatic, _ = train(tmp_path / "automatic", "bert", "gradual_gap", storage=storage)
    assert_same_bits(automatic.model, whole.model)  # the Trainer's optimizer is AdamW, and the model is fresh
