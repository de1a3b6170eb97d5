"""How fast do sparse layers run on a CPU? Against the best of torch, onnxruntime and OpenVINO, in the same minutes.

    python benchmarks/inference.py layers [--threads 2] [--rounds 15] [--all] [--python FILE] [--json FILE]

Each engine is a process (our kernels and torch share one). They take turns in blocks of about 5 ms, so that whatever
else the machine does hits all of them; an engine that is not installed is left out, and the table says so. A time is
the 30th percentile of the means of its blocks: above it there is other people's load. `--python` is the interpreter for
the other engines, where they live in an environment of their own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from bench import Worker

SHAPES = [
    *((1024, 4096, n) for n in (1, 8, 32, 128, 512)),
    *((4096, 1024, n) for n in (1, 8, 32, 128, 512)),
    *((512, 4608, 49), (2048, 512, 49), (256, 2304, 196), (1024, 256, 196)),
]
"""(rows, columns, n) of W (rows x columns) times X (columns x n): of Transformers, then of ResNet-50's convolutions."""
MORE_SHAPES = [
    *((512, 4608, 392), (512, 2048, 49), (2048, 512, 392), (256, 2304, 1568), (256, 1024, 196)),
    *((128, 1152, 784), (512, 128, 784), (64, 576, 3136), (64, 256, 3136), (256, 64, 3136)),
]
VARIANTS = [
    *(("unstructured", sparsity) for sparsity in (0.8, 0.9, 0.95)),
    *((pattern, sparsity) for pattern in ("1x8", "8x1") for sparsity in (0.9, 0.95)),
]


def ask(engine: Worker, question: dict[str, Any]) -> dict[str, Any]:
    answer = engine.ask(question)
    if "why" in answer:
        raise SystemExit(f"{engine.name}: {answer['why']}")
    return answer


def time_shape(engines: list[Worker], shape: tuple[int, int, int], rounds: int) -> dict[str, list[float]]:
    """By product, the means of its blocks, over all engines in turn."""
    rows, columns, n = shape
    question = {"rows": rows, "columns": columns, "n": n, "variants": VARIANTS}
    products = [(engine, name) for engine in engines for name in ask(engine, question)["products"]]
    for engine, name in products:
        ask(engine, {"block": name})
    blocks: dict[str, list[float]] = {name: [] for _, name in products}
    for _ in range(rounds):
        for engine, name in products:
            blocks[name].append(ask(engine, {"block": name})["ms"] / 1e3)
    return blocks


def typical(blocks: list[float]) -> float:
    return sorted(blocks)[int(0.3 * (len(blocks) - 1))]


def spread(blocks: list[float]) -> float:
    """How far the slower blocks lie above the typical ones: 0 on a quiet machine."""
    return sorted(blocks)[int(0.8 * (len(blocks) - 1))] / typical(blocks) - 1


def row_of(shape: tuple[int, int, int], blocks: dict[str, list[float]]) -> dict[str, Any]:
    """What a shape came to: the best dense product, and how many times faster each sparse one is."""
    sparse = {f"{pattern} {sparsity:g}" for pattern, sparsity in VARIANTS}
    seconds = {name: typical(of) for name, of in blocks.items()}
    dense = {name: taken for name, taken in seconds.items() if name not in sparse}
    best = min(dense, key=lambda name: dense[name])
    rows, columns, n = shape
    return {
        "shape": shape,
        "best_dense": best,
        "gflops": {name: 2e-9 * rows * columns * n / taken for name, taken in dense.items()},
        "speed_up": {name: dense[best] / seconds[name] for name in seconds if name in sparse},
        "spread": statistics.median(spread(of) for of in blocks.values()),
        "seconds": seconds,
    }


def print_head(engines: list[Worker], threads: int) -> None:
    names = ", ".join(engine.name for engine in engines)
    print(f"{threads} threads, float32; engines asked: {names}. Times faster than the best dense product:\n")
    columns = [f"{pattern.replace('unstructured', 'un')} {100 * sparsity:g}" for pattern, sparsity in VARIANTS]
    print(f"| W | N | best dense, GF/s | {' | '.join(columns)} | spread |")
    print("|---|---|---|" + "---|" * (len(columns) + 1))


def print_row(row: dict[str, Any]) -> None:
    rows, columns, n = row["shape"]
    dense = f"{row['gflops'][row['best_dense']]:.0f} ({row['best_dense']})"
    cells = " | ".join(f"{times:.1f}" for times in row["speed_up"].values())
    print(f"| {rows}x{columns} | {n} | {dense} | {cells} | {row['spread']:.0%} |", flush=True)


def layers(arguments: argparse.Namespace) -> None:
    script = Path(__file__).with_name("engines.py")
    engines = [Worker(script, "growprune", arguments.threads)]
    engines += [Worker(script, name, arguments.threads, arguments.python) for name in ("onnxruntime", "openvino")]
    print_head(engines, arguments.threads)
    found = []
    for shape in arguments.shapes or SHAPES + MORE_SHAPES * arguments.all:
        found.append(row_of(shape, time_shape(engines, shape, arguments.rounds)))
        print_row(found[-1])
    for engine in engines:
        engine.close()
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


def shape_of(text: str) -> tuple[int, int, int]:
    rows, columns, n = map(int, text.split("x"))
    return rows, columns, n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    parts = kinds.add_parser("layers", help="single matrix products")
    parts.add_argument("--threads", type=int, default=2)
    parts.add_argument("--rounds", type=int, default=15)
    parts.add_argument("--all", action="store_true", help="more shapes")
    parts.add_argument("--shapes", type=shape_of, nargs="+", metavar="ROWSxCOLUMNSxN", help="these instead")
    parts.add_argument("--python", default=sys.executable, help="the interpreter that has the other engines")
    parts.add_argument("--json", type=Path)
    parts.set_defaults(run=layers)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
