"""gp.prune_pretrained on models of transformers, and the example that prunes, retrains, saves and generates."""

import copy
import re
import runpy
import sys
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import growprune as gp


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))


def llama(**options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **shape, **options))


def mixtral(implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = MixtralConfig(vocab_size=64, num_key_value_heads=1, num_local_experts=4, **shape)
    config._experts_implementation = implementation
    return MixtralForCausalLM(config)


def batches(count: int = 4) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(64, (count, 4, 24), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": some, "labels": some, "attention_mask": torch.ones_like(some)} for some in tokens]


def layer_errors(before: PreTrainedModel, after: PreTrainedModel) -> float:
    """How far the hidden states before the head are from what they were."""
    with torch.no_grad():
        a, b = (model.base_model(batches()[0]["input_ids"]).last_hidden_state for model in (before, after))
    return float((a - b).square().mean() / a.square().mean())


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_language_model_is_pruned_saved_and_generates(make: Any, pattern: str, tmp_path: Path) -> None:
    errors = {}
    for by in ("sparsegpt", "magnitude"):
        model = make()
        sparse = gp.prune_pretrained(model, batches(), by=by, pattern=pattern)
        assert (2 * sparse.num_alive, sparse.is_at_target) == (sparse.num_prunable, True)
        assert not any("head" in name or "wte" in name for name in sparse.masks)
        errors[by] = layer_errors(make().eval(), model.eval())
    assert errors["sparsegpt"] < errors["magnitude"]
    gp.save_pretrained(sparse, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt = torch.tensor([[1, 2, 3]])
    written = [m.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0) for m in (model, again)]
    assert torch.equal(*written)


@pytest.mark.parametrize("by", ["sparsegpt", "wanda"])
def test_bfloat16_models_are_pruned_with_statistics_in_float32(by: str) -> None:
    model = llama().bfloat16()
    before = copy.deepcopy(model)
    sparse = gp.prune_pretrained(model, batches(), by=by)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert sparse.is_at_target
    by_magnitude = copy.deepcopy(before)
    gp.prune_pretrained(by_magnitude, by="magnitude")
    if by == "sparsegpt":
        assert layer_errors(before, model) < layer_errors(before, by_magnitude)


def test_what_a_tokenizer_gives_is_a_batch() -> None:
    one, two = llama(), llama()
    gp.prune_pretrained(one, [UserDict(batch) for batch in batches()])
    gp.prune_pretrained(two, batches())
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def test_every_way_to_compute_experts_shows_their_tokens() -> None:
    masks = []
    for implementation in ("eager", "grouped_mm"):
        model = mixtral(implementation)
        masks.append(gp.prune_pretrained(model, batches(), by="wanda", pattern="2:4").masks)
    assert "model.layers.1.mlp.experts.down_proj" in masks[0]
    assert all(torch.equal(mask, masks[1][name]) for name, mask in masks[0].items())


def test_an_encoder_and_its_decoder_are_pruned_in_the_order_in_which_they_compute() -> None:
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    )
    sparse = gp.prune_pretrained(model, [{"input_ids": b["input_ids"], "labels": b["labels"]} for b in batches()])
    assert sparse.is_at_target


def test_adapters_stay_as_they_are() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], r=2))
    sparse = gp.prune_pretrained(model, batches())
    assert not any("lora" in name or "lm_head" in name for name in sparse.masks)
    assert sparse.is_at_target


def test_the_example_prunes_retrains_saves_and_generates(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["prune_pretrained.py", "--out", str(tmp_path)])
    runpy.run_path(str(ROOT / "examples" / "prune_pretrained.py"), run_name="__main__")
    cost, written, told = capsys.readouterr().out.splitlines()[-3:]
    assert cost == "retraining needs 0.6 MiB and activations; dense, it would need 1.5 MiB"  # 16 bytes a value
    assert written.startswith("the quick brown fox jumps")
    found = re.fullmatch(r"loss ([\d.]+) dense, ([\d.]+) pruned, ([\d.]+) retrained; 24580 of 81920 weights live", told)
    dense, pruned, retrained = map(float, found.groups())  # type: ignore[union-attr]
    assert dense < pruned < 0.5
    assert retrained < 1.1 * dense
