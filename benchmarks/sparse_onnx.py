"""How large, exact and fast are sparse ONNX files? python benchmarks/sparse_onnx.py [--json FILE]

Each model is pruned by magnitude to 90 % and written dense and sparse. onnxruntime and OpenVINO load both
files and run them in turns. The difference is that of the sparse file's outputs to those of the dense one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import growprune as gp
from growprune.recipes import RECIPES

SPARSITY, THREADS, ROUNDS, BLOCK_SECONDS = 0.9, 2, 9, 0.1
Given = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    model: str
    runtime: str
    dense_bytes: int
    sparse_bytes: int
    difference: float
    dense_load: float
    """Seconds."""
    sparse_load: float
    dense_ms: float
    sparse_ms: float


def digits() -> tuple[nn.Module, Given]:
    task = RECIPES["digits/dense"]().task
    return task.build_model(), task.example()


def resnet18() -> tuple[nn.Module, Given]:
    task = replace(RECIPES["classification-cifar10/dense"]().task, width=64)  # type: ignore[call-arg]
    return task.build_model(), torch.randn(1, 3, 32, 32)


def encoder() -> tuple[nn.Module, Given]:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(1, 64, 512)


def llama() -> tuple[nn.Module, Given]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}
    tokens = torch.randint(0, 1000, (1, 64))
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
    return model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


MODELS = {"digits CNN": digits, "ResNet-18": resnet18, "encoder, 6 layers": encoder, "Llama, 4 layers": llama}


def onnxruntime(path: Path) -> Callable[[Given], Any]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return lambda given: session.run(None, feed(names, given))[0]


def openvino(path: Path) -> Callable[[Given], Any]:
    import openvino as ov

    settings = {
        "INFERENCE_NUM_THREADS": THREADS,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "ENABLE_CPU_PINNING": False,
    }
    compiled = ov.Core().compile_model(path, "CPU", settings)
    names = [one.any_name for one in compiled.inputs]
    return lambda given: compiled(feed(names, given))[0].copy()


def feed(names: list[str], given: Given) -> dict[str, Any]:
    tensors = given if isinstance(given, dict) else {names[0]: given}
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def measured(model: str, folder: Path) -> list[Row]:
    torch.manual_seed(0)
    module, example = MODELS[model]()
    sparse = gp.SparseModel(module.eval(), sparsity=SPARSITY)
    sparse.prune()
    paths = [folder / "dense.onnx", folder / "sparse.onnx"]
    for path in paths:
        gp.export_onnx(sparse, path, example, sparse=path.stem == "sparse")
    rows = []
    for runtime in (onnxruntime, openvino):
        loads, runs, outputs = [], [], []
        for path in paths:
            start = time.perf_counter()
            runs.append(run := runtime(path))
            loads.append(time.perf_counter() - start)
            outputs.append(run(example))
        times: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for run, found in zip(runs, times, strict=True):
                found.append(block(lambda run=run: run(example)))
        dense_ms, sparse_ms = (1e3 * sorted(found)[ROUNDS * 3 // 10] for found in times)
        difference = float(np.abs(outputs[0] - outputs[1]).max())
        sizes = [path.stat().st_size for path in paths]
        rows.append(Row(model, runtime.__name__, *sizes, difference, *loads, dense_ms, sparse_ms))
    return rows


def block(call: Callable[[], object]) -> float:
    """The mean seconds of a call."""
    count, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < BLOCK_SECONDS:
        call()
        count += 1
    return passed / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default=",".join(MODELS), help="names of models, with commas between them")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    print("| model | runtime | dense | sparse | of dense | difference | load | run |")
    for model in [name for name in MODELS if any(one and one in name for one in arguments.only.split(","))]:
        with tempfile.TemporaryDirectory() as folder:
            rows += measured(model, Path(folder))
        for row in rows[-2:]:
            sizes = f"{row.dense_bytes / 1e6:.2f} MB | {row.sparse_bytes / 1e6:.2f} MB"
            share, load = row.sparse_bytes / row.dense_bytes, f"{row.dense_load:.2f} -> {row.sparse_load:.2f} s"
            run = f"{row.dense_ms:.3g} -> {row.sparse_ms:.3g} ms"
            print(f"| {row.model} | {row.runtime} | {sizes} | {share:.3f}x | {row.difference:g} | {load} | {run} |")
    if arguments.json:
        content = {"sparsity": SPARSITY, "threads": THREADS, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
