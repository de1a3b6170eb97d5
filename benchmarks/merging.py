"""Does merging LoRA into a sparse model change it, and what does the masked adapter cost? On a CPU, in a minute.

    python benchmarks/merging.py [--threads 2] [--rounds 9] [--json FILE] [--small]

Four small models are pruned to 80 % by magnitude, and LoRA is trained for 30 steps. The difference is the largest of
the outputs before and after `merge_and_unload`, as a share of the largest output. A step is a forward and a backward
pass and AdamW's step, on the sparse model and on the same model in plain torch, with its zeros; they take turns.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench import cpu_name
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import growprune as gp
from growprune.tasks.classification.resnet import ResNet

STEPS, SPARSITY = 30, 0.8


@dataclass(frozen=True)
class Row:
    model: str
    adapters: str
    difference: float
    sparse_ms: float
    """Of a step with the masked adapter."""
    plain_ms: float
    """Of a step with PEFT's own."""


def llama(width: int) -> tuple[nn.Module, Any]:
    sizes = {"vocab_size": 1000, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)), {"input_ids": torch.randint(1000, (4, 128))}


def gpt2(width: int) -> tuple[nn.Module, Any]:
    config = GPT2Config(
        **{"vocab_size": 1000, "n_embd": width, "n_layer": 4, "n_head": 4, "bos_token_id": None, "eos_token_id": None},
        **{"resid_pdrop": 0, "attn_pdrop": 0, "embd_pdrop": 0},
    )
    return GPT2LMHeadModel(config), {"input_ids": torch.randint(1000, (4, 128))}


def bert(width: int) -> tuple[nn.Module, Any]:
    sizes = {"vocab_size": 1000, "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 4}
    config = BertConfig(**sizes, num_attention_heads=4, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    return BertModel(config), {"input_ids": torch.randint(1000, (4, 128))}


def resnet(width: int) -> tuple[nn.Module, Any]:
    return ResNet("resnet18", stem="cifar", width=width // 8, num_classes=10), {"x": torch.randn(16, 3, 32, 32)}


MODELS: dict[str, tuple[Callable[[int], tuple[nn.Module, Any]], dict[str, Any]]] = {
    "Llama, q, k, v and up": (llama, {"target_modules": ["q_proj", "k_proj", "v_proj", "up_proj"]}),
    "GPT-2, c_attn and c_fc (Conv1D)": (gpt2, {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    "BERT, query and value, dropout 0.1": (bert, {"target_modules": ["query", "value"], "lora_dropout": 0.1}),
    "ResNet-18, all 3 x 3 convolutions": (resnet, {"target_modules": ["conv1", "conv2"], "use_rslora": True}),
}
"""By name, how it is built, and its adapters."""


def output_of(model: nn.Module, inputs: Any) -> Tensor:
    found = model(**inputs)
    return found if isinstance(found, Tensor) else found[0]


def trainer(model: nn.Module, inputs: Any) -> Callable[[], None]:
    """One step of training towards a random target."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    target = torch.randn_like(output_of(model, inputs)).detach()

    def step() -> None:
        optimizer.zero_grad()
        (output_of(model, inputs) - target).square().mean().backward()
        optimizer.step()

    return step


def measured(name: str, width: int, rounds: int) -> Row:
    torch.manual_seed(0)
    build, options = MODELS[name]
    model, inputs = build(width)
    sparse = gp.SparseModel(model, sparsity=SPARSITY)
    sparse.prune()
    plain = build(width)[0]
    plain.load_state_dict(model.state_dict())
    config = LoraConfig(r=8, **options)
    adapted, beside = get_peft_model(model, config), get_peft_model(plain, config)
    steps = [trainer(adapted.train(), inputs), trainer(beside.train(), inputs)]
    for _ in range(STEPS):
        steps[0]()
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, taken in zip(steps, times, strict=True):
            start = time.perf_counter()
            step()
            taken.append(1e3 * (time.perf_counter() - start))
    with torch.no_grad():
        before = output_of(adapted.eval(), inputs)
        after = output_of(adapted.merge_and_unload(), inputs)
    difference = float((after - before).abs().max() / before.abs().max())
    sparse_ms, plain_ms = (sorted(taken)[int(0.3 * (rounds - 1))] for taken in times)
    return Row(name.partition(",")[0], name.partition(", ")[2], difference, sparse_ms, plain_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    print("| model | adapters | difference | ms a step | PEFT's own | ratio |\n|---|---|---:|---:|---:|---:|")
    rows = []
    for name in MODELS:
        rows.append(row := measured(name, 32 if arguments.small else 256, arguments.rounds))
        times = f"{row.sparse_ms:.1f} | {row.plain_ms:.1f} | {row.sparse_ms / row.plain_ms:.2f}"
        print(f"| {row.model} | {row.adapters} | {row.difference:.1e} | {times} |", flush=True)
    if arguments.json:
        content = {"cpu": cpu_name(), "threads": arguments.threads, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
