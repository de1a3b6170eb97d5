"""Large blocks: the three products of a layer against cuBLAS, and whole training steps against dense ones.

    python benchmarks/block_training.py kernels   # each product, by shape, block, sparsity and tokens
    python benchmarks/block_training.py step      # 8 Transformer blocks, d=4096, 90 %, one of four parts grown
    python benchmarks/block_training.py all --json FILE

On one H200 all of it takes less than three minutes; after `--seconds` no further row of `kernels` is begun. `--small`
runs it on a CPU in seconds, to see that it works. `--json FILE` is written after every row, and a row that fails is
shown as failed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compact_training import device, fused, median_seconds, next_token_loss, peak_gib, sparse_with_one_part_grown, wait
from models import LanguageModel
from torch import Tensor, nn

from growprune.storage import block_products, kernels

SHAPES = [(4096, 4096), (16384, 4096), (4096, 16384)]
"""Outputs and inputs."""
SPARSITIES = (0.9, 0.8, 0.7, 0.95, 0.85)
PRODUCTS = ("output", "input", "values")
SPLIT = {
    "AdamW": "multi_tensor",
    "live blocks": "_output_kernel|_input_kernel|_values_kernel|_neighbours_kernel",
    "dense and back": "_expand_kernel|_compress_kernel",
    "cuBLAS": "gemm|nvjet",
    "attention": "flash|fmha|attention",
}
"""Into which the kernels of a step are sorted, by what their names hold."""


class Results:
    """What was found so far, in a file if one is wanted."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.found = path, {"kernels": [], "step": {}}  # type: ignore[var-annotated]
        self.found["device"] = torch.cuda.get_device_name() if device().type == "cuda" else "cpu"

    def write(self) -> None:
        if self.path:
            self.path.write_text(json.dumps(self.found, indent=1))


def milliseconds(run: Callable[[], object]) -> float:
    """The quickest of three rounds, without what the first call takes to compile."""
    if device().type != "cuda":
        return 1000 * median_seconds(run, 1)
    run()
    times = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(5):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 5)
    return min(times)


def random_blocks(rows: int, columns: int, side: int, sparsity: float) -> Tensor:
    """A mask with just as many live blocks as the sparsity says."""
    down, across = rows // side, columns // side
    order = torch.randperm(down * across, generator=torch.Generator().manual_seed(0)).view(down, across)
    alive = order < round((1 - sparsity) * down * across)
    return alive.to(device()).repeat_interleave(side, 0).repeat_interleave(side, 1)


class Layer:
    """The operands of the three products, and every way to them."""

    def __init__(self, shape: tuple[int, int], side: int, sparsity: float, tokens: int) -> None:
        torch.manual_seed(0)
        mask = random_blocks(*shape, side, sparsity)
        found = block_products.live_blocks(mask, side, side)
        assert found is not None
        self.blocks, self.side = found, side
        dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
        self.x, self.dy = (torch.randn(tokens, n, device=device(), dtype=dtype) for n in (shape[1], shape[0]))
        self.bits, self.group = kernels.pack(mask.view(-1)), 1
        self.offsets, num_alive = kernels.block_offsets(self.bits)
        self.values = torch.randn(num_alive, device=device()).to(dtype)
        self.weight = self.expanded()

    def expanded(self) -> Tensor:
        size = self.blocks.sizes[0] * self.side, self.blocks.sizes[1] * self.side
        n = size[0] * size[1]
        return kernels.expand(self.values, self.bits, self.offsets, n, self.x.dtype, 1).view(size)

    def dense(self, product: str) -> Callable[[], Tensor]:
        """cuBLAS, with a weight that is dense already."""
        return {
            "output": lambda: self.x @ self.weight.t(),
            "input": lambda: self.dy @ self.weight,
            "values": lambda: self.dy.t() @ self.x,
        }[product]

    def sparse(self, product: str) -> Callable[[], Tensor]:
        x, dy, values, layout = self.x, self.dy, self.values, self
        return {
            "output": lambda: block_products.output(layout, x, values, None),
            "input": lambda: block_products.input_gradient(layout, dy, values),
            "values": lambda: block_products.values_gradient(layout, dy, x, torch.float32),
        }[product]

    def to(self, device: torch.device) -> Layer:
        """Stand in for a layout, which is where it is."""
        del device
        return self


def time_product(layer: Layer, product: str, baseline: float) -> dict[str, Any]:
    """The time, and the error against cuBLAS."""
    exact = layer.dense(product)().float()
    if product == "values":
        exact = kernels.compress(exact.view(-1), layer.bits, layer.offsets, layer.values.numel(), exact.dtype, 1)
    run = layer.sparse(product)
    error = float((run().float() - exact).abs().max() / exact.abs().max().clamp_min(1e-9))
    time = milliseconds(run)
    return {"dense ms": baseline, "error": error, "ms": time, "ratio": time / baseline}


def time_kernels(args: argparse.Namespace, results: Results) -> None:
    shapes, sides, lengths = (SHAPES, (64, 128, 32), (8192, 1024)) if not args.small else ([(256, 256)], (32,), (16,))
    cases = list(itertools.product(lengths, SPARSITIES, sides, shapes))
    start, baselines = time.perf_counter(), {}
    print("| tokens | W | block | sparsity | output | input | values | all three | notes |")
    print("|---:|---|---|---:|---:|---:|---:|---:|---|")
    for number, (tokens, sparsity, side, shape) in enumerate(cases):
        if time.perf_counter() - start > args.seconds:
            print(f"{len(cases) - number} rows were not begun, as {args.seconds} s are over")
            break
        row: dict[str, Any] = {"tokens": tokens, "shape": shape, "block": side, "sparsity": sparsity}
        try:
            layer = Layer(shape, side, sparsity, tokens)
            for product in PRODUCTS:
                key = (tokens, shape, product)
                baselines[key] = baselines.get(key) or milliseconds(layer.dense(product))
                row[product] = time_product(layer, product, baselines[key])
        except Exception:  # as above
            row["failed"] = traceback.format_exc(limit=3)
        results.found["kernels"].append(row)
        results.write()
        print(line(row), flush=True)
    for text in when_it_pays(results.found["kernels"]):
        print(text)


def line(row: dict[str, Any]) -> str:
    products = [row.get(product, {}) for product in PRODUCTS]
    cells = [f"{p['ratio']:.3f}" if "ratio" in p else "failed" for p in products]
    done = [p for p in products if "ratio" in p]
    total = f"{sum(p['ms'] for p in done) / sum(p['dense ms'] for p in done):.3f}" if len(done) == 3 else ""
    wrong = max((p["error"] for p in done), default=0.0)
    notes = f" WRONG by {wrong:.2g}" if wrong > 2**-6 else ""
    notes += f" {row['failed']}" if "failed" in row else ""
    rows, columns = row["shape"]
    first = f"| {row['tokens']} | {rows}x{columns} | {row['block']} | {row['sparsity']:.0%} |"
    return f"{first} {' | '.join(cells)} | {total} | {notes} |"


def when_it_pays(rows: list[dict[str, Any]]) -> list[str]:
    """For each block and number of tokens, the lowest sparsity from which all shapes are faster than cuBLAS."""
    found = []
    for tokens, side in dict.fromkeys((row["tokens"], row["block"]) for row in rows):
        mine = [row for row in rows if (row["tokens"], row["block"]) == (tokens, side)]
        for product in PRODUCTS:
            worst: dict[float, float] = {}
            for row in mine:
                ratio = row.get(product, {}).get("ratio", float("inf"))
                worst[row["sparsity"]] = max(worst.get(row["sparsity"], 0.0), ratio)
            pays = [s for s in worst if all(worst[t] < 1 for t in worst if t >= s)]
            said = f"from {min(pays):.0%}" if pays else "at no sparsity tried"
            shown = ", ".join(f"{s:.0%}: {worst[s]:.2f}" for s in sorted(worst))
            found.append(f"{tokens} tokens, {side}x{side}, {product}: pays {said} (slowest shape: {shown})")
    return found


def time_steps(args: argparse.Namespace, results: Results) -> None:
    rows = {"dense": None, "compact, unstructured": "unstructured", "compact, 64x64": "64x64"}
    rows["compact, 128x128"] = "128x128"
    if args.small:
        rows = {"dense": None, "compact, 32x32": "32x32"}
    for name, pattern in rows.items():
        gc.collect()
        try:
            results.found["step"][name] = one_model(args, pattern)
        except Exception:  # as above
            results.found["step"][name] = {"failed": traceback.format_exc(limit=5)}
        results.write()
        print(name, results.found["step"][name], flush=True)
    print_steps(results.found["step"])


def one_model(args: argparse.Namespace, pattern: str | None) -> dict[str, Any]:
    """Peak memory and step time, and what the GPU did in a step."""
    num_blocks, d, lengths = (8, 4096, (8192, 1024)) if not args.small else (2, 256, (64, 16))

    def build() -> nn.Module:
        return LanguageModel(num_blocks, d, d // 128 or 1)

    torch.manual_seed(0)
    if pattern is None:
        with device():
            model = build()
    else:
        sparse, _ = sparse_with_one_part_grown(
            "compact", build, 4 if not args.small else 2, keep_dense=["head"], pattern=pattern
        )
        model = sparse.model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, **fused(), capturable=device().type == "cuda")
    if pattern is not None:
        sparse.attach(optimizer)
    found: dict[str, Any] = {}
    peak_gib(reset=True)
    for length in lengths:
        step = stepping(model, optimizer, length)
        step()  # in which kernels compile
        wait()
        peak_gib(reset=True)
        found[f"{length} tokens ms"] = 1000 * median_seconds(step, args.repeats)
        found[f"{length} tokens GiB"] = peak_gib(reset=True)
        if length == lengths[0]:
            try:
                found["split"] = split(step)
            except RuntimeError as problem:  # no profiler here
                found["split"] = {"failed": str(problem)[:200]}
    return found


def stepping(model: nn.Module, optimizer: Any, length: int) -> Callable[[], None]:
    tokens = torch.randint(256, (max(1, length // 1024), min(length, 1024) + 1), device=device())

    def step() -> None:
        next_token_loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def split(step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of the GPU in one step, by kind of kernel."""
    if device().type != "cuda":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        wait()
    found: dict[str, float] = {}
    for event in profile.key_averages():
        kind = next((kind for kind, names in SPLIT.items() if re.search(names, event.key)), "other")
        found[kind] = found.get(kind, 0.0) + event.self_device_time_total / 1000
    return {kind: round(taken, 2) for kind, taken in found.items()}


def print_steps(rows: dict[str, Any]) -> None:
    names = [name for name in rows["dense"] if name.endswith(("ms", "GiB"))]
    print("| storage | " + " | ".join(names) + " | of which, ms |\n|---|" + "---:|" * len(names) + "---|")
    for storage, row in rows.items():
        ratios = [f"{row[n]:.2f} ({row[n] / rows['dense'][n]:.3f}x)" if n in row else "failed" for n in names]
        print(f"| {storage} | " + " | ".join(ratios) + f" | {row.get('split', {})} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kernels", "step", "all"])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--repeats", type=int, default=10, help="step: steps to take the median of")
    parser.add_argument("--seconds", type=float, default=80, help="kernels: when to begin no further row")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.autograd.set_multithreading_enabled(False)  # as growprune's own loop has it, for dense models too
    results = Results(args.json)
    if args.what in ("step", "all"):
        time_steps(args, results)
    if args.what in ("kernels", "all"):
        time_kernels(args, results)


if __name__ == "__main__":
    main()
