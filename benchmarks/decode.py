"""Sparse layers for decoding on a GPU against cuBLAS in bfloat16, batches 1 to 16.

    python benchmarks/decode.py tiles              every format with every tile, 90 %, batch 1, on two large shapes
    python benchmarks/decode.py layers             every format with its best tile, by shape, sparsity and batch
    python benchmarks/decode.py model              a whole decode step of 8 blocks, as CUDA graphs, through `deploy`
    python benchmarks/decode.py all --json FILE    all of them, in three minutes at most

How it is measured: calls are recorded as one CUDA graph, between events, the median of ten replays. Dense and sparse
alike, the calls go through so many copies of the weights in turn (512 MB of them, two at least) that none is in the
second-level cache (50 MB) when it is read again. `TB/s` is what was read of the matrix. What fails is a row that says
why, and stops nothing; the JSON is written anew after every shape. Without a GPU, `--small` only shows that it runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.deployment.api import deploy_on_gpu
from growprune.deployment.cpu.matrix import SparseMatrix, from_dense
from growprune.deployment.cuda import tuning
from growprune.deployment.cuda.graphs import graphed, microseconds
from growprune.deployment.cuda.products import LaneMatrix, Tile, lane_matrix
from growprune.deployment.cuda.products import product as multiply
from growprune.deployment.cuda.tuning import TILES, copies, dense_linear, time_of, times_of_tiles
from growprune.deployment.example import Example
from growprune.errors import first_line

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORMATS: dict[str, Callable[[SparseMatrix], LaneMatrix]] = {
    "offsets": lambda entries: lane_matrix(entries, lanes=16),
    "offsets, runs of 8": lambda entries: lane_matrix(entries, lanes=8),
}
MORE_TILES = (
    *TILES,
    Tile(4, 16, 4),
    Tile(4, 32, 1),
    Tile(4, 64, 2, is_pinned=True),
    Tile(4, 8, 4, is_pinned=True),
    Tile(8, 32, 4, is_pinned=True),
    Tile(1, 32, 4, is_pinned=True),
)
GATES = ((8192, 8192), (28672, 8192))
WANTED = 3.0
"""Times cuBLAS, of both in one run."""


@dataclasses.dataclass
class Report:
    """What was found, on the screen and in the file."""

    path: Path | None
    end: float
    found: dict[str, Any] = dataclasses.field(default_factory=dict)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def add(self, name: str, rows: Any) -> None:
        self.found.setdefault(name, []).extend(rows)
        if self.path is not None:
            self.path.write_text(json.dumps(self.found, indent=1))

    @property
    def is_time_up(self) -> bool:
        return time.monotonic() > self.end


def microseconds_on_a_cpu(calls: Sequence[Callable[[], object]]) -> float:
    """Time calls without a graph, to show without a GPU that all of this runs."""
    begin = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - begin) * 1e6 / len(calls)


if DEVICE.type != "cuda":
    microseconds = tuning.microseconds = microseconds_on_a_cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tiles", "layers", "model", "all"))
    parser.add_argument("--seconds", type=float, default=150, help="after which no new shape is begun")
    parser.add_argument("--blocks", type=int, default=8, help="of the model")
    parser.add_argument("--batch", type=int, default=1, help="of the model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    report = Report(options.json, time.monotonic() + options.seconds)
    torch.manual_seed(0)
    gc.freeze()  # torch may collect garbage before it records a graph, and there are hundreds
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    report.add("machine", [name, f"torch {torch.__version__}"])
    report.say(f"{name}, torch {torch.__version__}; a copy moves {attempt(copied_tb_per_second)} TB/s")
    parts = {"tiles": tiles, "model": model, "layers": layers}
    for part in parts.values() if options.what == "all" else [parts[options.what]]:
        start = time.monotonic()
        with torch.no_grad():
            part(options, report)
        report.say(f"({part.__name__}: {time.monotonic() - start:.0f} s)\n")
    gc.unfreeze()


def attempt(function: Callable[[], Any]) -> Any:
    """What a function returns, or why it failed: nothing may stop the others."""
    try:
        return function()
    except Exception as error:
        return f"failed: {first_line(error)}"


def weight_of(rows: int, columns: int, sparsity: float) -> Tensor:
    """Random, with as many zeros; bfloat16."""
    weight = torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16)
    for some in weight.split(1024):
        some[torch.rand(some.shape, device=DEVICE) < sparsity] = 0
    return weight


def dense_us(rows: int, columns: int, batch: int) -> float:
    weight = torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16)
    x = torch.randn(batch, columns, device=DEVICE, dtype=torch.bfloat16)
    return time_of(copies(dense_linear(weight)), x)


def copied_tb_per_second() -> str:
    source = torch.zeros((1 << 30) if DEVICE.type == "cuda" else (1 << 20), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    taken = microseconds([lambda: target.copy_(source)] * 4)
    return f"{2 * source.numel() / taken / 1e6:.2f}"


# Tiles


def tiles(options: argparse.Namespace, report: Report) -> None:
    """Every format with every tile; and whether the best of each shape is what is wanted."""
    ratios = []
    for rows, columns in [(96, 320)] if options.small else GATES:
        ratio = attempt(lambda: tiles_of_shape(rows, columns, options, report))  # noqa: B023
        if isinstance(ratio, str):
            report.say(f"{rows} x {columns} {ratio}")
        ratios.append(ratio if isinstance(ratio, float) else 0.0)
    is_reached = min(ratios) >= WANTED
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    report.say(f"at least {WANTED} x cuBLAS on both, batch 1, 90 %: {'reached' if is_reached else 'MISSED'} ({shown})")
    report.add("gate", [{"ratios": ratios, "is_reached": is_reached}])


def tiles_of_shape(rows: int, columns: int, options: argparse.Namespace, report: Report) -> float:
    """How many times as fast as cuBLAS the best is."""
    dense = dense_us(rows, columns, 1)
    report.say(f"{rows} x {columns}, 90 %, batch 1: cuBLAS takes {dense:.1f} us")
    report.say("| format | tile | us | x cuBLAS | TB/s | error |\n|---|---|---|---|---|---|")
    weight = weight_of(rows, columns, 0.9)
    entries, found = from_dense(weight).to(DEVICE, weight.dtype), []
    for name in FORMATS:
        mine = attempted(name, entries, weight, 1, MORE_TILES[:2] if options.small else MORE_TILES)
        for row in sorted(mine, key=lambda row: row["us"] if isinstance(row["us"], float) else float("inf")):
            report.say(line(row, dense))
        found += mine
    case = {"shape": [rows, columns], "sparsity": 0.9, "batch": 1, "dense_us": dense}
    report.add("tiles", [{**case, "rows": found}])
    best = min((row["us"] for row in found if is_right(row)), default=float("inf"))
    report.say(f"best of {rows} x {columns}: {best:.1f} us, {dense / best:.2f} x cuBLAS\n")
    return dense / best


def is_right(row: dict[str, Any]) -> bool:
    return isinstance(row["us"], float) and row["error"] < 4e-3  # rounding to bfloat16 gives 2e-3


def attempted(
    name: str, entries: SparseMatrix, weight: Tensor, batch: int, some: tuple[Tile, ...]
) -> list[dict[str, Any]]:
    """A row for each tile of a format, or one that says why there is none."""
    rows: list[dict[str, Any]] = []
    failed = attempt(lambda: rows.extend(timed_tiles(name, entries, weight, batch, some)))
    return rows if failed is None else [*rows, {"format": name, "tile": "-", "us": failed, "error": 0.0, "bytes": 0}]


def timed_tiles(
    name: str, entries: SparseMatrix, weight: Tensor, batch: int, some: tuple[Tile, ...]
) -> Iterator[dict[str, Any]]:
    matrix = FORMATS[name](entries)
    x = torch.randn(batch, entries.columns, device=DEVICE, dtype=torch.bfloat16)
    expected = F.linear(x.float(), weight.float())
    for tile, us in times_of_tiles(matrix, some, batch):
        error = relative(multiply(matrix, x, tile), expected) if isinstance(us, float) else 0.0
        shown = us if isinstance(us, float) else f"failed: {us}"
        yield {"format": name, "tile": short(tile), "us": shown, "error": error, "bytes": matrix.nbytes}


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def short(tile: Tile) -> str:
    return f"{tile.warps} warps, width {tile.width}, {tile.steps} steps" + ", pinned" * tile.is_pinned


def line(row: dict[str, Any], dense: float) -> str:
    us = row["us"]
    if isinstance(us, str):
        return f"| {row['format']} | {row['tile']} | {us} | - | - | - |"
    wrong = "" if is_right(row) else " WRONG"
    read = row["bytes"] / us / 1e6
    return f"| {row['format']} | {row['tile']} | {us:.1f} | {dense / us:.2f} | {read:.2f} | {row['error']:.1e}{wrong} |"


# Layers


def cases(*, small: bool) -> Iterator[tuple[tuple[int, int], float, int]]:
    """Shape, sparsity and batch, what matters most first."""
    if small:
        yield from (((96, 320), 0.9, 1), ((96, 320), 0.9, 3))
        return
    for shape in (*GATES, (8192, 28672), (4096, 4096), (11008, 4096)):
        yield shape, 0.9, 1
    for sparsity in (0.7, 0.8, 0.95):
        yield (8192, 8192), sparsity, 1
    for batch in (4, 8, 16):
        yield (8192, 8192), 0.9, batch
    for sparsity, batch in ((0.7, 16), (0.8, 16), (0.95, 16), (0.7, 4)):
        yield (8192, 8192), sparsity, batch
    for sparsity, batch in ((0.7, 1), (0.8, 1), (0.95, 1), (0.9, 16)):
        yield (28672, 8192), sparsity, batch


def layers(options: argparse.Namespace, report: Report) -> None:
    kinds = [name for name in FORMATS if "runs" not in name]
    report.say(
        "| shape | sparsity | batch | cuBLAS us | " + " | ".join(f"{k} us" for k in kinds) + " | best x cuBLAS |"
    )
    report.say("|" + "---|" * (5 + len(kinds)))
    for (rows, columns), sparsity, batch in cases(small=options.small):
        if report.is_time_up:
            report.say(f"| {rows} x {columns} | {sparsity:.0%} | {batch} | not measured: time was up |")
            continue
        found = attempt(lambda: layer_row(rows, columns, sparsity, batch, kinds))  # noqa: B023
        if isinstance(found, str):
            report.say(f"| {rows} x {columns} | {sparsity:.0%} | {batch} | {found} |")
            found = {"shape": [rows, columns], "sparsity": sparsity, "batch": batch, "us": found}
        else:
            times = [f"{us:.1f}" if isinstance(us, float) else us for us in found["us"].values()]
            cells = " | ".join([f"{found['dense_us']:.1f}", *times, f"{found['ratio']:.2f}"])
            report.say(f"| {rows} x {columns} | {sparsity:.0%} | {batch} | {cells} |")
        report.add("layers", [found])


def layer_row(rows: int, columns: int, sparsity: float, batch: int, kinds: list[str]) -> dict[str, Any]:
    """Microseconds of each format with the best of a few tiles."""
    dense, weight = dense_us(rows, columns, batch), weight_of(rows, columns, sparsity)
    entries, us = from_dense(weight).to(DEVICE, weight.dtype), dict[str, Any]()
    for kind in kinds:
        found = attempted(kind, entries, weight, batch, TILES[:4])
        right = [row["us"] for row in found if is_right(row)]
        us[kind] = min(right) if right else next((str(r["us"]) for r in found if isinstance(r["us"], str)), "WRONG")
    best = min((taken for taken in us.values() if isinstance(taken, float)), default=float("inf"))
    case = {"shape": [rows, columns], "sparsity": sparsity, "batch": batch}
    return {**case, "dense_us": dense, "us": us, "ratio": dense / best}


# Model


class Block(nn.Module):
    """RMSNorm, attention over a cache, RMSNorm, gated feed-forward: one new token for each sample."""

    def __init__(self, d: int, hidden: int, heads: int, batch: int, context: int) -> None:
        super().__init__()
        self.heads, self.width = heads, d
        self.qkv, self.out = linear(d, 3 * d), linear(d, d)
        self.up, self.down = linear(d, 2 * hidden), linear(hidden, d)
        cache = torch.randn(2, batch, heads, context, d // heads, device=DEVICE)
        self.register_buffer("cache", cache.bfloat16())
        self.register_buffer("position", torch.tensor([context - 1], device=DEVICE))

    def forward(self, x: Tensor) -> Tensor:
        fresh = self.qkv(F.rms_norm(x, (self.width,))).view(len(x), 3, self.heads, 1, -1)
        self.cache.index_copy_(3, self.position, fresh[:, 1:].transpose(0, 1))
        mixed = F.scaled_dot_product_attention(fresh[:, 0], self.cache[0], self.cache[1])
        x = x + self.out(mixed.reshape(len(x), -1))
        gate, value = self.up(F.rms_norm(x, (self.width,))).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


def linear(columns: int, rows: int) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=False, device="meta")
    layer.weight = nn.Parameter(weight_of(rows, columns, 0.9) * (10 / columns) ** 0.5, requires_grad=False)
    return layer


def model(options: argparse.Namespace, report: Report) -> None:
    """A step of 8 blocks of d=4096, 11008 hidden, over 512 tokens: all dense against what `deploy` keeps."""
    found = attempt(lambda: model_row(options, report))
    if isinstance(found, str):
        report.say(f"the whole step {found}")
        found = {"us": found}
    report.add("model", [found])


def model_row(options: argparse.Namespace, report: Report) -> dict[str, Any]:
    d, hidden, heads, context = (64, 96, 2, 8) if options.small else (4096, 11008, 32, 512)
    blocks = 1 if options.small else options.blocks
    dense = nn.Sequential(*(Block(d, hidden, heads, options.batch, context) for _ in range(blocks))).eval()
    x = torch.randn(options.batch, d, device=DEVICE, dtype=torch.bfloat16)
    fast = deploy_on_gpu(dense, Example.of(x), device=DEVICE, seconds=0.5 if options.small else 20.0, known={})
    report.say("\n".join(str(fast.table).splitlines()[:5]))
    report.say("\n".join(f"{row.layer}: {row.choice} {row.tile}" for row in fast.table[:4]))
    error = relative(fast(x), dense(x).float())
    taken = {name: step_us(net, x) for name, net in (("dense", dense), ("sparse", fast), ("dense again", dense))}
    for name, us in taken.items():
        report.say(f"{name:12} {us:9.1f} us a step")
    ratio = min(taken["dense"], taken["dense again"]) / taken["sparse"]
    report.say(f"the whole step: {ratio:.2f} times as fast; relative difference of the outputs {error:.1e}")
    return {"us": taken, "ratio": ratio, "error": error, "layers": fast.table.to_dict()["rows"][:4]}


def step_us(net: nn.Module, x: Tensor) -> float:
    """Of a step that is recorded once and replayed; the weights of all blocks are far more than a cache holds."""
    if DEVICE.type != "cuda":
        return microseconds([lambda: net(x)])
    step = graphed(net, x)
    assert relative(step(x), net(x).float()) < 1e-2, "a replayed step differs from an eager one"
    taken = []
    for _ in range(30):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "12")
        start.record()
        step()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) * 1e3)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
