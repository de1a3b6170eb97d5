"""Moving averages of a model that a Trainer makes sparse are as sparse as it is."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers_cases import make_data, make_model, make_trainer

from growprune import GrowpruneError
from growprune.integrations.transformers import GrowPruneCallback


class TimmEma(nn.Module):
    """As timm's ModelEmaV3: a copy in `module`, moved towards the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.5)


def torch_ema(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))


class Averaging(hf.TrainerCallback):
    """As users write it."""

    def __init__(self, make: Any, event: str = "on_step_end") -> None:
        self.make, self.average = make, None
        setattr(self, event, self.update)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.average = self.make(kwargs["model"])

    def update(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.average.update_parameters(kwargs["model"])  # type: ignore[attr-defined]


def assert_as_sparse(average: nn.Module, callback: GrowPruneCallback) -> None:
    assert callback.sparse is not None and callback.sparse.is_at_target
    weights = dict(average.named_parameters())
    for name, mask in callback.sparse.masks.items():
        assert not weights[name][~mask].any()
        assert weights[name][mask].any()


@pytest.mark.parametrize(
    ("make", "event", "is_first"),
    [(torch_ema, "on_step_end", True), (torch_ema, "on_optimizer_step", False), (TimmEma, "on_step_end", False)],
)
def test_an_average_that_a_callback_keeps_has_the_masks_of_the_model(
    make: Any, event: str, is_first: bool, tmp_path: Path
) -> None:
    averaging, callback = Averaging(make, event), GrowPruneCallback("gradual_gap", sparsity=0.75, every=2)
    callbacks = [averaging, callback] if is_first else [callback, averaging]
    make_trainer(tmp_path, make_model("bert"), make_data("bert"), *callbacks).train()
    assert_as_sparse(averaging.average.module, callback)


def test_a_copy_that_is_kept_elsewhere_is_named(tmp_path: Path) -> None:
    callback, model = GrowPruneCallback("gradual_gap", sparsity=0.75, every=2), make_model("bert")
    average = torch_ema(model)
    callback.add_copy(average)

    class Updating(hf.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            average.update_parameters(kwargs["model"])

    make_trainer(tmp_path, model, make_data("bert"), callback, Updating()).train()
    assert_as_sparse(average.module, callback)


def test_a_teacher_of_the_same_class_is_left_alone(tmp_path: Path) -> None:
    class Teaching(hf.TrainerCallback):
        def __init__(self) -> None:
            self.teacher = make_model("bert", seed=1)

    teaching, callback = Teaching(), GrowPruneCallback("rigl", sparsity=0.75)
    make_trainer(tmp_path, make_model("bert"), make_data("bert"), callback, teaching).train()
    before = make_model("bert", seed=1).state_dict()
    assert all(torch.equal(before[name], weight) for name, weight in teaching.teacher.state_dict().items())


@pytest.mark.parametrize("is_first", [True, False])
def test_an_average_of_compact_weights_is_refused(is_first: bool, tmp_path: Path) -> None:
    averaging = Averaging(torch_ema, "on_optimizer_step")
    callback = GrowPruneCallback("rigl", sparsity=0.75, storage="compact", every=2)
    callbacks = [averaging, callback] if is_first else [callback, averaging]
    trainer = make_trainer(tmp_path, make_model("bert"), make_data("bert"), *callbacks)
    with pytest.raises(GrowpruneError, match=r"a callback averages the weights.*use storage='masked'"):
        trainer.train()


def test_a_copy_of_another_model_is_refused(tmp_path: Path) -> None:
    callback = GrowPruneCallback("rigl", sparsity=0.75)
    callback.add_copy(torch_ema(make_model("vit")))
    with pytest.raises(GrowpruneError, match=r"the copy has no parameter .*: pass a copy of the same model"):
        make_trainer(tmp_path, make_model("bert"), make_data("bert"), callback).train()
