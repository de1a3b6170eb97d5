"""`generate` of a Llama-shaped model on a GPU: tokens a second, dense and deployed, both with CUDA graphs.

    python benchmarks/generate.py                            1 B and 7 B weights, 50 % and 90 %, bfloat16, batch 1
    python benchmarks/generate.py --sizes 7B --sparsity 0.9 --json FILE
    python benchmarks/generate.py --no-fuse                  q, k, v and gate, up as products of their own

Values and masks are random. `step` is what one more token takes: the difference of a long and a short call, divided by
that of their tokens, so that neither the prompt nor the recording counts. `call` is a whole call with its prompt and
its recording. The fastest of a few calls. `error` is the largest of any layer's weights, relative to their norm.
`fused` counts the layers that are computed as one with others. Without a GPU, `--small` only shows that it runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from growprune.deployment.api import deploy_on_gpu
from growprune.deployment.cuda.generation import prepare_generation
from growprune.deployment.example import Example

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES: dict[str, dict[str, int]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_key_value_heads": 8},
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_key_value_heads": 32},
    "small": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_key_value_heads": 2},
}
HEADS = {"1B": 32, "7B": 32, "small": 4}


def build(size: str, sparsity: float) -> LlamaForCausalLM:
    """A model with random weights, of which this share is zero in each linear layer of its blocks."""
    torch.manual_seed(0)
    vocabulary = 64 if size == "small" else 32000
    config = LlamaConfig(
        vocab_size=vocabulary, num_attention_heads=HEADS[size], eos_token_id=None, pad_token_id=0, **SIZES[size]
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if size == "small" else torch.bfloat16)
    with DEVICE:
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
    torch.set_default_dtype(before)
    for layer in model.model.layers.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.masked_fill_(torch.rand(layer.weight.shape, device=DEVICE) < sparsity, 0)
    return model


def seconds(model: Any, prompt: Tensor, new_tokens: int, repeats: int) -> float:
    taken = []
    for _ in range(repeats + 1):  # the first compiles
        _synchronize()
        start = time.perf_counter()
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False)
        _synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def _synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def measure(model: Any, arguments: argparse.Namespace) -> dict[str, float]:
    prompt = torch.ones(arguments.batch, arguments.prompt, dtype=torch.long, device=DEVICE)
    short, long = arguments.tokens // 4, arguments.tokens
    # the long one first: transformers then gives the short one a cache of the same length
    whole, brief = (seconds(model, prompt, count, arguments.repeats) for count in (long, short))
    return {
        "step_tokens_per_second": arguments.batch * (long - short) / max(whole - brief, 1e-9),
        "call_tokens_per_second": arguments.batch * long / whole,
        "gigabytes": num_bytes(model.model.layers) / 1e9,
    }


def num_bytes(module: nn.Module) -> int:
    """Of all weights, with what layers that are computed as one share."""
    fused = [layer.together.func.__self__ for layer in module.modules() if getattr(layer, "together", None)]
    tensors = [tensor for part in (module, *fused) for tensor in (*part.parameters(), *part.buffers())]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def rows_of(size: str, sparsity: float, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    model = build(size, sparsity)
    token = Example.of({"input_ids": torch.ones(arguments.batch, 1, dtype=torch.long, device=DEVICE)})
    rows = []
    for values in (None, "int8"):
        options: Any = {"seconds": arguments.seconds, "known": {}, "values": values, "fuse": arguments.fuse}
        fast = deploy_on_gpu(model, token, device=DEVICE, **options)
        errors = [row.error for row in fast.table if row.error is not None]
        about = {"model": f"deployed{', int8' if values else ''}", "error": max(errors, default=0.0)}
        about["fused"] = sum(row.choice == "fused" for row in fast.table)
        rows.append(about | measure(fast.module, arguments))
        del fast
        gc.collect()
    prepare_generation(model)  # the same graphs
    rows.insert(0, {"model": "dense", "error": 0.0, "fused": 0} | measure(model, arguments))
    dense = rows[0]["step_tokens_per_second"]
    return [{"size": size, "sparsity": sparsity, "times": row["step_tokens_per_second"] / dense, **row} for row in rows]


def show(row: dict[str, Any]) -> None:
    speeds = f"step {row['step_tokens_per_second']:8.1f}/s  call {row['call_tokens_per_second']:8.1f}/s"
    about = f"{row['times']:5.2f}x  {row['gigabytes']:6.2f} GB  error {row['error']:.2%}  fused {row['fused']}"
    print(f"{row['size']:6} {row['sparsity']:.0%}  {row['model']:15} {speeds}  {about}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["1B", "7B"], choices=list(SIZES))
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.5, 0.9])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20, help="how long layers are timed when deploying")
    parser.add_argument("--fuse", action=argparse.BooleanOptionalAction, default=True, help="q, k, v; gate, up")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true", help="a tiny model, to show that it runs")
    arguments = parser.parse_args()
    if arguments.small:
        small = {"sizes": ["small"], "sparsity": [0.9], "prompt": 4, "tokens": 8, "repeats": 1, "seconds": 0}
        vars(arguments).update(small)
    found = []
    for size in arguments.sizes:
        for sparsity in arguments.sparsity:
            for row in rows_of(size, sparsity, arguments):
                show(row)
                found.append(row)
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"device": str(DEVICE), "torch": torch.__version__, "rows": found}, indent=1)
        )


if __name__ == "__main__":
    main()
