"""Methods that look at gradients before the first step, in the Trainer of transformers: SNIP and GraSP."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers_cases import assert_same_bits, make_data, make_model, make_trainer, train

from growprune import By, SparseModel
from growprune.integrations.transformers import GrowPruneCallback
from growprune.masks.inspection import output_layers


class Noting(hf.Trainer):
    """Notes what it is given, and what is drawn from the random numbers."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.__dict__.setdefault("seen", []).append((inputs["input_ids"].sum().item(), torch.rand(()).item()))
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.parametrize(("method", "storage"), [("snip", "masked"), ("snip", "compact"), ("grasp", "masked")])
def test_snip_and_grasp_reach_the_target_and_resume_bit_exactly(method: str, storage: str, tmp_path: Path) -> None:
    given = {"storage": storage, "allocation": "uniform", "args": {"save_strategy": "steps", "save_steps": 3}}
    trainer, callback = train(tmp_path, "bert", method, **given)
    assert callback.sparse is not None and callback.sparse.num_alive * 4 == callback.sparse.num_prunable
    again, _ = train(tmp_path, "bert", method, **given, resume=f"{tmp_path}/checkpoint-3")
    assert_same_bits(again.model, trainer.model)


@pytest.mark.parametrize("method", ["snip", "grasp"])
def test_snip_and_grasp_score_the_batches_of_the_first_step(method: str, tmp_path: Path) -> None:
    data, model = make_data("gpt2", 8), make_model("gpt2")
    for one in (model, by_hand := make_model("gpt2")):
        for module in one.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    callback = GrowPruneCallback(method, sparsity=0.75)
    args = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2}
    make_trainer(tmp_path, model, data, callback, **args).train()  # each step has all of the data

    by_hand.set_attn_implementation("eager")
    expected = SparseModel(by_hand, sparsity=0.75, allocation="global", keep_dense=output_layers(by_hand)[0])
    words = torch.stack([row["input_ids"] for row in data])
    expected.score(By(method), [lambda: by_hand(input_ids=words, labels=words).loss])
    expected.prune(by=By(method))
    differing = sum(int((mask != expected.masks[name]).sum()) for name, mask in callback.sparse.masks.items())
    assert differing <= 0.01 * callback.sparse.num_prunable  # sums in another order, for weights that are about equal


def test_looking_leaves_batches_and_random_numbers_as_they_are(tmp_path: Path) -> None:
    def seen(method: str) -> list[Any]:
        usual = make_trainer(tmp_path, make_model("bert"), make_data("bert"))
        callback = GrowPruneCallback(method, sparsity=0.75, allocation="uniform")
        trainer = Noting(make_model("bert"), usual.args, train_dataset=make_data("bert"), callbacks=[callback])
        trainer.train()
        found: list[Any] = trainer.seen
        return found

    plain, looked = seen("static_random"), seen("snip")
    assert len(plain) == 8
    assert looked[0][0] == plain[0][0]
    assert looked[1:] == plain
