"""How fast does a pruned Llama generate on a CPU? python benchmarks/generate.py [--threads 2] [--json FILE]

A Llama of about 100 million weights, random masks, a prompt of 16 tokens and 32 new ones. Deployed, torch in float32
and torch in bfloat16 take turns in one process; a row is the 30th percentile of the milliseconds per token.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench import cpu_name
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import growprune as gp

PROMPT, NEW_TOKENS = 16, 32


@dataclass(frozen=True)
class Row:
    sparsity: float
    deployed_ms: float
    """Per token."""
    float32_ms: float
    bfloat16_ms: float
    num_sparse: int
    """How many layers run sparse on a single token."""
    num_layers: int
    has_same_tokens: bool


def llama(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 8000, "hidden_size": width, "intermediate_size": 2048, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=12, eos_token_id=None, pad_token_id=0)).eval()


def measured(model: nn.Module, sparsity: float, rounds: int, seconds: float) -> Row:
    sparse = gp.SparseModel(model, sparsity=sparsity, allocation="uniform")
    sparse.prune(by=gp.By.RANDOM)
    model = sparse.to_dense_()
    prompt = torch.randint(0, 8000, (1, PROMPT))
    models: list[Any] = [gp.deploy(model, {"input_ids": prompt}, seconds=seconds), model]
    models.append(copy.deepcopy(model).bfloat16())
    times: list[list[float]] = [[] for _ in models]
    tokens: list[Any] = [None] * len(models)
    for _ in range(rounds):
        for i, one in enumerate(models):
            start = time.perf_counter()
            with torch.inference_mode():
                tokens[i] = one.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
            times[i].append((time.perf_counter() - start) / NEW_TOKENS)
    found = (1e3 * sorted(some)[int(0.3 * (rounds - 1))] for some in times)
    rows = [row for row in models[0].table if row.shape.endswith(" x 1")]
    num_sparse = sum(row.choice == "sparse" for row in rows)
    return Row(sparsity, *found, num_sparse, len(rows), torch.equal(tokens[0], tokens[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=30.0, help="for timing layers")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    rows = []
    print("| sparsity | deployed | float32 | bfloat16 | against the faster | sparse layers | same tokens |")
    for sparsity in (0.5, 0.7, 0.9):
        model = llama(96, 1) if arguments.small else llama(768, 12)
        row = measured(model, sparsity, arguments.rounds, arguments.seconds)
        rows.append(row)
        ratio = min(row.float32_ms, row.bfloat16_ms) / row.deployed_ms
        times = f"{row.deployed_ms:.1f} | {row.float32_ms:.1f} | {row.bfloat16_ms:.1f} | {ratio:.2f}x"
        print(
            f"| {sparsity:.0%} | {times} | {row.num_sparse} of {row.num_layers} | {row.has_same_tokens} |", flush=True
        )
    if arguments.json:
        content = {"cpu": cpu_name(), "threads": arguments.threads, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
