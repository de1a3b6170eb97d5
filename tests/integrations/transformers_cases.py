"""Tiny models of transformers, made of their configurations, and trainers for them; nothing is fetched."""

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

from growprune.integrations.transformers import GrowPruneCallback

TEXT = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LONG = {**TEXT, "intermediate_size": 32, "max_position_embeddings": 16}
GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
MOE = {**LONG, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
IMAGE = {**TEXT, "intermediate_size": 32, "image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3}
IMAGE.pop("vocab_size")
T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}

MODELS: dict[str, Any] = {
    "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**LONG, num_labels=3)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, bos_token_id=0, eos_token_id=0)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LONG, num_key_value_heads=2, tie_word_embeddings=False)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**MOE)),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5, decoder_start_token_id=0)),
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**IMAGE)),
}


def make_model(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = MODELS[name]()
    return model


def make_data(name: str, size: int = 16) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(0, 32, (size, 8), generator=draw)
    if name == "vit":
        return [{"pixel_values": torch.randn(1, 8, 8, generator=draw), "labels": i % 3} for i in range(size)]
    return [{"input_ids": row, "labels": i % 3 if name == "bert" else row} for i, row in enumerate(words)]


def make_trainer(
    folder: Path, model: nn.Module, data: list[dict[str, Any]], *callbacks: Any, optimizers: Any = None, **given: Any
) -> hf.Trainer:
    usual = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "seed": 1, "save_strategy": "no"}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
    args = hf.TrainingArguments(str(folder), **{**usual, **quiet, "max_steps": 8, **given})
    more = {} if optimizers is None else {"optimizers": optimizers}
    return hf.Trainer(model, args, train_dataset=data, eval_dataset=data[:4], callbacks=list(callbacks), **more)


def train(
    folder: Path, name: str, method: str = "rigl", *, resume: str | None = None, args: Any = None, **given: Any
) -> tuple[hf.Trainer, GrowPruneCallback]:
    """Train a tiny model for 8 steps, to three quarters of zeros."""
    callback = GrowPruneCallback(method, sparsity=0.75, **given)
    trainer = make_trainer(folder, make_model(name), make_data(name), callback, **(args or {}))
    trainer.train(resume_from_checkpoint=resume)
    return trainer, callback


def assert_same_bits(one: nn.Module, other: nn.Module) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    assert [key for key in mine if not torch.equal(mine[key], theirs[key])] == []
