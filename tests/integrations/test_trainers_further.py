"""Both trainers extend a finished training, prune a sparse model further, and know a pretrained one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pl = pytest.importorskip("lightning.pytorch")

import transformers as hf  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning_cases import QUIET, Module, assert_same, fit, shuffled, zeros  # noqa: E402
from transformers_cases import assert_same_bits, make_data, make_model, make_trainer, train  # noqa: E402

from growprune import GrowpruneError  # noqa: E402
from growprune.integrations.lightning import GrowPrune  # noqa: E402
from growprune.integrations.transformers import GrowPruneCallback  # noqa: E402

pytestmark = [*QUIET, pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode")]
STORAGES = pytest.mark.parametrize("storage", ["masked", "compact"])
METHODS = pytest.mark.parametrize("method", ["gradual_gap", "cyclic_gap"])


# A finished training is extended


@STORAGES
@METHODS
def test_lightning_trains_on_with_fixed_masks_after_the_plan(method: str, storage: str, tmp_path: Path) -> None:
    def run(max_epochs: int, epoch: int | None = None) -> tuple[Module, GrowPrune]:
        callback, saving = (
            GrowPrune(method, sparsity=0.9, storage=storage),
            ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1),
        )
        checkpoint = None if epoch is None else tmp_path / f"epoch={epoch}.ckpt"
        how = {"train": shuffled(), "ckpt": checkpoint, "max_epochs": max_epochs, "callbacks": [saving]}
        return fit(tmp_path, callback, **how), callback

    _, first = run(4)
    module, callback = run(8, 3)
    assert module.trainer.global_step == 48
    assert callback.cursor.is_over and callback.cursor.iteration == 24
    assert zeros(module, callback) == 1728  # 90 % of 1,920
    assert all(torch.equal(mask, first.sparse.masks[name]) for name, mask in callback.sparse.masks.items())
    again, _ = run(8, 5)  # killed while it was extended
    assert_same(again, module)
    with pytest.raises(GrowpruneError, match=r"has 24 optimizer steps, but the Trainer makes 48: set .*max_epochs=4\)"):
        run(8, 1)


@STORAGES
@METHODS
def test_transformers_trains_on_with_fixed_masks_after_the_plan(method: str, storage: str, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 4, "max_steps": -1}

    def run(epochs: int, step: int | None = None) -> tuple[hf.Trainer, GrowPruneCallback]:
        folder = None if step is None else f"{tmp_path}/checkpoint-{step}"
        args = {**saving, "num_train_epochs": epochs}
        return train(tmp_path, "gpt2", method, storage=storage, args=args, resume=folder)

    _, first = run(2)
    trainer, callback = run(4, 8)
    assert trainer.state.global_step == 16
    assert callback.cursor.is_over and callback.cursor.iteration == 8
    assert callback.sparse.is_at_target
    assert all(torch.equal(mask, first.sparse.masks[name]) for name, mask in callback.sparse.masks.items())
    again, _ = run(4, 12)
    assert_same_bits(again.model, trainer.model)
    with pytest.raises(GrowpruneError, match=r"has 8 optimizer steps, but the Trainer makes 16: set .*"):
        run(4, 4)


# From 80 to 95 %


@pytest.mark.parametrize("method", ["gmp", "one_shot"])
def test_zeros_that_a_method_revives_are_named_with_what_a_callback_can_do(method: str, tmp_path: Path) -> None:
    module = Module()
    module.load_state_dict(fit(tmp_path, GrowPrune(sparsity=0.8)).state_dict())
    with pytest.warns(UserWarning, match=r"make them non-zero: .* use a method with initial_mask, such as gradual_gap"):
        fit(tmp_path, GrowPrune(method, sparsity=0.9), module)


# A pretrained model


class Around(pl.LightningModule):
    """A module as anyone would write it around a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch[0].abs().mul(9).long() % 32
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    make_model("gpt2").save_pretrained(tmp_path / "pretrained")
    return tmp_path / "pretrained"


def in_lightning(folder: Path, model: nn.Module, **said: Any) -> GrowPrune:
    callback = GrowPrune("rigl", sparsity=0.5, **said)
    fit(folder, callback, Around(model), limit_val_batches=0)
    return callback


def in_transformers(folder: Path, model: nn.Module, **said: Any) -> GrowPruneCallback:
    callback = GrowPruneCallback("rigl", sparsity=0.5, **said)
    make_trainer(folder, model, make_data("gpt2"), callback).train()
    return callback


@pytest.mark.parametrize("run", [in_lightning, in_transformers])
def test_a_pretrained_model_keeps_its_largest_weights_and_one_line_says_so(
    run: Any, pretrained: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    def load() -> nn.Module:
        return hf.GPT2LMHeadModel.from_pretrained(pretrained)

    with pytest.warns(UserWarning, match=r"already trained \(loaded by from_pretrained\)") as told:
        callback = run(tmp_path, load())
    assert sum("already trained" in str(warning.message) for warning in told) == 1
    assert callback.cursor.plan.options["initial_mask"] == "magnitude"
    for mask in ("random", "magnitude"):
        assert run(tmp_path, load(), initial_mask=mask).cursor.plan.options["initial_mask"] == mask
    assert run(tmp_path, make_model("gpt2")).cursor.plan.options["initial_mask"] == "random"
    assert not [warning for warning in recwarn if "already trained" in str(warning.message)]
