"""How fast do whole sparse networks run on a CPU? Against torch, torch.compile, onnxruntime and OpenVINO.

    python benchmarks/inference_networks.py [--threads 2] [--rounds 15] [--only resnet50,encoder] [--python FILE]
                                            [--engines NAME,...] [--json FILE] [--seconds 20] [--small]

Masks are random, as speed does not depend on what was trained, but for how the live weights are spread over the layers.
Each engine is a process, and they take turns, about 60 ms each: see growprune/inference/bench.py. `--python` is the
interpreter for onnxruntime and OpenVINO, where they live in an environment of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIANTS = [("unstructured", 0.8), ("unstructured", 0.9), ("unstructured", 0.95), ("8x1", 0.9)]
MUST = {
    "resnet50": dict(zip(VARIANTS, (1.4, 2.0, 2.5, 2.4), strict=True)),
    "encoder": dict(zip(VARIANTS, (2.2, 2.7, 3.5, 3.2), strict=True)),
}
"""What a prototype measured, times as fast as the best dense engine; a gate sits 20 % below."""


def load(
    network: str, pattern: str, sparsity: float, seconds: float, small: bool
) -> tuple[Any, Any, Callable[[], Any]]:
    """A model with random masks, an example, and what deploys it. Each engine calls it in its own process."""
    import torch

    import growprune as gp

    torch.manual_seed(0)
    model, example, keep_dense = NETWORKS[network](small)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparse = gp.SparseModel(model.eval(), sparsity=sparsity, pattern=pattern, keep_dense=keep_dense)
        sparse.prune(by=gp.By.RANDOM)
    return sparse, example, lambda: gp.deploy(sparse, example, seconds=seconds)


def resnet50(small: bool) -> tuple[Any, Any, list[str]]:
    """At batch 1; the stem stays dense."""
    import torch

    from growprune.tasks.classification.resnet import ResNet

    size = 32 if small else 224
    return ResNet("resnet50", width=8 if small else 64), torch.randn(1, 3, size, size), ["conv1"]


def encoder(small: bool) -> tuple[Any, Any, list[str]]:
    """6 layers, 512/2048, 64 tokens."""
    import torch
    from torch import nn

    sizes = (32, 4, 64) if small else (512, 8, 2048)
    layer = nn.TransformerEncoderLayer(*sizes, dropout=0.0, batch_first=True)
    depth = 2 if small else 6
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), torch.randn(1, 64, sizes[0]), []


NETWORKS: dict[str, Callable[[bool], tuple[Any, Any, list[str]]]] = {"resnet50": resnet50, "encoder": encoder}


def measure(network: str, variant: tuple[str, float], arguments: argparse.Namespace) -> dict[str, Any]:
    from growprune.inference.bench import bench

    pattern, sparsity = variant
    about = {"network": network, "pattern": pattern, "sparsity": sparsity}
    found = bench(
        f"{Path(__file__).resolve()}:load",
        {**about, "seconds": arguments.seconds, "small": arguments.small},
        threads=arguments.threads,
        rounds=arguments.rounds,
        python=arguments.python,
        engines=arguments.engines.split(","),
    )
    times = {timing.engine: timing.ms for timing in found if timing.ms is not None}
    dense = {name: ms for name, ms in times.items() if name != "deployed"}
    best = min(dense, key=lambda name: dense[name]) if dense else None
    ratio = dense[best] / times["deployed"] if best is not None and "deployed" in times else None
    must = None if arguments.small else MUST[network][variant]
    return {**about, "best": best, "ratio": ratio, "must": must, "engines": [dataclasses.asdict(t) for t in found]}


def print_row(row: dict[str, Any]) -> None:
    by_name = {timing["engine"]: timing for timing in row["engines"]}
    cells = []
    for timing in by_name.values():
        ms, spread = timing["ms"], timing["spread"]
        cells.append("-" if ms is None else f"{ms:.2f} ({spread:.0%})")
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    head = f"{row['network']} | {row['pattern']} {100 * row['sparsity']:g}"
    print(f"| {head} | {' | '.join(cells)} | {row['best']} | {ratio} | {row['must'] or '-'} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=20.0, help="for tuning")
    parser.add_argument("--only", default=",".join(NETWORKS))
    parser.add_argument("--engines", default="deployed,torch,compile,onnxruntime,openvino")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true", help="tiny networks, to see that it runs")
    arguments = parser.parse_args()
    names = arguments.engines.split(",")
    print(f"{arguments.threads} threads, float32, ms (spread):\n")
    print(f"| network | mask | {' | '.join(names)} | best dense | times as fast | prototype |")
    print("|---|---|" + "---|" * (len(names) + 3))
    rows = []
    for network in arguments.only.split(","):
        for variant in VARIANTS[:1] if arguments.small else VARIANTS:
            rows.append(measure(network, variant, arguments))
            print_row(rows[-1])
    missing = {timing["engine"]: timing["why"] for row in rows for timing in row["engines"] if timing["ms"] is None}
    for name, why in missing.items():
        print(f"\n{name} was not measured: {why}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"threads": arguments.threads, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
