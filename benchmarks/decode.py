"""Sparse layers for decoding on a GPU against cuBLAS in bfloat16, batches 1 to 16.

    python benchmarks/decode.py tune [--json tune.json]                    which tiles are fastest, per format
    python benchmarks/decode.py layers [--tiles tune.json] [--json FILE]   every format against dense, by shape
    python benchmarks/decode.py model [--batch 1]                          a whole decode step, as CUDA graphs
    python benchmarks/decode.py all [--json FILE]                          one after the other, with the tiles of tune

All times are of CUDA graphs. Layers are timed over copies of the weights, so many that no cache holds them. What is
faster in one run of `layers` is what counts; `TB/s` is what the fastest format read of its matrix. Without a GPU,
`--small` only shows that everything runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.inference.cuda import (
    Captured,
    DenseLinear,
    Entries,
    SemiStructuredLinear,
    SparseLinear,
    choose,
    from_dense,
    microseconds,
    product,
    table,
)
from growprune.inference.cuda.choosing import FORMATS, TILES, copies, fastest, time_of
from growprune.inference.cuda.lanes import lane_matrix
from growprune.inference.cuda.products import BitmaskTile, LaneTile, Matrix, Tile

SHAPES = ((4096, 4096), (8192, 8192), (28672, 8192), (8192, 28672))
SPARSITIES, BATCHES = (0.7, 0.8, 0.9, 0.95), (1, 4, 8, 16)
LANE_KNOBS = {
    "width": (16, 32, 64, 128),
    "steps": (1, 2, 4),
    "is_ahead": (True, False),
    "warps": (2, 4, 8),
    "lanes": (8, 16, 32),
    "split": (0, 1, 2, 4),
}
BITMASK_KNOBS = {"rows": (16, 32, 64, 128), "columns": (64, 128, 256), "warps": (2, 4, 8), "stages": (1, 2, 3, 4)}
KNOBS: dict[str, dict[str, tuple[Any, ...]]] = {
    "offsets": LANE_KNOBS,
    "columns": LANE_KNOBS,
    "bitmask": BITMASK_KNOBS,
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "layers", "model", "all"))
    parser.add_argument("--shapes", nargs="+", help="ROWSxCOLUMNS")
    parser.add_argument("--sparsities", nargs="+", type=float)
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--seconds", type=float, default=6, help="of tuning, for each format, sparsity and batch")
    parser.add_argument("--tiles", type=Path, help="what tune wrote")
    parser.add_argument("--batch", type=int, default=1, help="of the model")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--sparsity", type=float, default=0.9, help="of the model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    gc.freeze()  # torch collects garbage before it captures a graph, and there are hundreds
    print(f"{torch.cuda.get_device_name() if DEVICE.type == 'cuda' else 'CPU'}, torch {torch.__version__}")
    with torch.no_grad():
        found = {"tune": tune, "layers": layers, "model": model, "all": every}[options.what](options)
    gc.unfreeze()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def every(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, run in (("tune", tune), ("layers", layers), ("model", model)):
        start = time.monotonic()
        found[name] = run(options, found["tune"]) if name == "layers" else run(options)
        print(f"{name} took {time.monotonic() - start:.0f} s\n", flush=True)
    return found


def asked(options: argparse.Namespace, shapes: Any, sparsities: Any, batches: Any) -> tuple[Any, Any, Any]:
    """Shapes, sparsities and batches: what was asked for, or else the usual ones."""
    if options.small:
        return [(96, 320)], [0.9], [1, 3]
    given = [tuple(int(n) for n in shape.split("x")) for shape in options.shapes or ()]
    return given or shapes, options.sparsities or sparsities, options.batches or batches


def weight_of(rows: int, columns: int, sparsity: float) -> Tensor:
    """Random, with as many zeros; bfloat16."""
    weight = torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16)
    for some in weight.split(1024):
        some[torch.rand(some.shape, device=DEVICE) < sparsity] = 0
    return weight


# layers


def layers(options: argparse.Namespace, tuned: Any = ()) -> list[dict[str, Any]]:
    shapes, sparsities, batches = asked(options, SHAPES, SPARSITIES, BATCHES)
    tuned = json.loads(options.tiles.read_text()) if options.tiles else tuned
    kinds = list(FORMATS)
    print(f"a device-to-device copy moves {copied_tb_per_second():.2f} TB/s")
    print(
        "| shape | sparsity | batch | dense us | " + " | ".join(f"{k} us" for k in kinds) + " | best | x dense | TB/s |"
    )
    print("|" + "---|" * (7 + len(kinds)))
    found = []
    for rows, columns in shapes:
        dense = {batch: dense_us(rows, columns, batch) for batch in batches}
        for sparsity in sparsities:
            weight = weight_of(rows, columns, sparsity)
            entries = from_dense(weight)
            for batch in batches:
                row = {"shape": (rows, columns), "sparsity": sparsity, "batch": batch, "dense_us": dense[batch]}
                found.append(row | compare(entries, weight, batch, tuned, kinds))
                print(line(found[-1], kinds), flush=True)
    semi_structured_table(shapes, batches)
    worst = max(row["error"] for row in found)
    print(f"largest relative error against float32: {worst:.1e} (rounding to bfloat16 gives 2e-3)")
    assert worst < 4e-3, "a kernel is wrong"
    return found


def compare(entries: Entries, weight: Tensor, batch: int, tuned: Any, kinds: list[str]) -> dict[str, Any]:
    """Microseconds of each format with its best tile, the tiles, and the largest error."""
    x = torch.randn(batch, entries.columns, device=DEVICE, dtype=torch.bfloat16)
    expected = F.linear(x.float(), weight.float())
    found: dict[str, Any] = {"us": {}, "error": 0.0, "tiles": {}, "bytes": {}}
    for kind in kinds:
        matrix, tiles = prepared(kind, entries, batch, tuned)
        tile, found["us"][kind] = fastest(matrix, tiles, batch)
        error = (product(matrix, x, tile).float() - expected).norm() / expected.norm()
        found["error"] = max(found["error"], float(error))
        found["tiles"][kind] = dataclasses.asdict(tile)
        found["bytes"][kind] = matrix.num_bytes
    return found


def prepared(kind: str, entries: Entries, batch: int, tuned: Any) -> tuple[Matrix, tuple[Tile, ...]]:
    """The matrix and the tiles to try: those that tuning found for the most similar case, or the usual ones."""
    alike = [case for case in tuned if case["kind"] == kind]
    if not alike:
        return FORMATS[kind](entries), tuple(TILES[kind])
    case = min(alike, key=lambda c: (abs(c["batch"] - batch), abs(c["sparsity"] - entries.sparsity)))
    matrix, tiles = made(kind, entries, case["best"])
    return matrix, (*tiles, *TILES[kind])


def made(kind: str, entries: Entries, knobs: dict[str, Any]) -> tuple[Matrix, tuple[Tile, ...]]:
    if kind == "bitmask":
        return FORMATS[kind](entries), (BitmaskTile(**knobs),)
    rest = {name: value for name, value in knobs.items() if name != "lanes"}
    lanes = knobs.get("lanes", 16)
    if kind == "offsets" and entries.sparsity > 0.93:  # runs of 16 would be cut short
        lanes = min(lanes, 8)
    return lane_matrix(entries, lanes=lanes, has_offsets=kind == "offsets"), (LaneTile(**rest),)


def line(row: dict[str, Any], kinds: list[str]) -> str:
    (rows, columns), us, dense = row["shape"], row["us"], row["dense_us"]
    best = min(kinds, key=lambda kind: us[kind])
    times = " | ".join(f"{us[kind]:.1f}" for kind in kinds)
    read = row["bytes"][best] / us[best] / 1e6
    return (
        f"| {rows} x {columns} | {row['sparsity']:.0%} | {row['batch']} | {dense:.1f} | {times} | "
        f"{best if us[best] < dense else 'dense'} | {dense / us[best]:.2f} | {read:.2f} |"
    )


def dense_us(rows: int, columns: int, batch: int) -> float:
    weight = torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16)
    x = torch.randn(batch, columns, device=DEVICE, dtype=torch.bfloat16)
    return time_of(copies(DenseLinear(weight), weight.numel() * 2), x)


def semi_structured_table(shapes: Any, batches: Any) -> None:
    """2:4 through core torch, which keeps half of the weights."""
    for rows, columns in shapes if DEVICE.type == "cuda" else ():
        weight = torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16)
        weight.view(-1, 4)[:, 2:] = 0
        found = []
        for batch in batches:
            x = torch.randn(batch, columns, device=DEVICE, dtype=torch.bfloat16)
            try:
                found.append(f"{batch}: {time_of([SemiStructuredLinear(weight) for _ in range(4)], x):.1f}")
            except (RuntimeError, NotImplementedError, ValueError) as error:
                found.append(f"{batch}: {str(error).splitlines()[0][:60]}")
        print(f"2:4 through torch, {rows} x {columns}, us by batch: {', '.join(found)}", flush=True)


def copied_tb_per_second() -> float:
    source = torch.zeros((1 << 30) if DEVICE.type == "cuda" else (1 << 20), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    taken = microseconds([lambda: target.copy_(source)] * 4, device=DEVICE)
    return 2 * source.numel() / taken / 1e6


# tune


def tune(options: argparse.Namespace) -> list[dict[str, Any]]:
    shapes, sparsities, batches = asked(options, ((8192, 8192),), (0.9, 0.7), (1, 16))
    seconds = 0.2 if options.small else options.seconds
    found = []
    for rows, columns in shapes:
        dense = {batch: dense_us(rows, columns, batch) for batch in batches}
        for sparsity in sparsities:
            entries = from_dense(weight_of(rows, columns, sparsity))
            for batch, kind in ((batch, kind) for batch in batches for kind in FORMATS):
                tried = dict(climb(kind, entries, batch, seconds))
                best = min(tried, key=lambda knobs: tried[knobs])
                case = {"rows": rows, "columns": columns, "sparsity": sparsity, "batch": batch, "kind": kind}
                trials = [{**dict(knobs), "us": us} for knobs, us in sorted(tried.items(), key=lambda item: item[1])]
                found.append({**case, "us": tried[best], "best": dict(best), "trials": trials})
                ratio = f"{dense[batch] / tried[best]:.2f} x dense, the slowest took {max(tried.values()):.1f}"
                print(
                    f"{sparsity:.0%} batch {batch:2} {kind:8} {tried[best]:7.1f} us, {ratio}: {dict(best)}", flush=True
                )
    return found


def climb(
    kind: str, entries: Entries, batch: int, seconds: float
) -> Iterator[tuple[tuple[tuple[str, Any], ...], float]]:
    """One knob at a time, from the usual tile on, until nothing helps or time is up."""
    start: Tile = TILES[kind][0]
    knobs = {name: getattr(start, name, 16) for name in KNOBS[kind]}  # lanes are no knob of a tile, but 16
    end, seen, best = time.monotonic() + seconds, {}, None
    improves = True
    while improves and time.monotonic() < end:
        improves = False
        for name, values in KNOBS[kind].items():
            for value in values:
                key = tuple((knobs | {name: value}).items())
                if key in seen or (seen and time.monotonic() > end):
                    continue
                matrix, tiles = made(kind, entries, dict(key))
                seen[key] = fastest(matrix, tiles, batch)[1]
                yield key, seen[key]
                if best is None or seen[key] < best:
                    improves, best = best is not None, seen[key]
            knobs = dict(min(seen, key=lambda key: seen[key]))


# model


class Block(nn.Module):
    """RMSNorm, attention over a cache, RMSNorm, gated feed-forward: one new token for each sample."""

    def __init__(
        self, d: int, hidden: int, heads: int, batch: int, context: int, linear: Callable[..., nn.Module]
    ) -> None:
        super().__init__()
        self.heads, self.width = heads, d
        self.qkv, self.out = linear("qkv", 3 * d, d), linear("out", d, d)
        self.up, self.down = linear("up", 2 * hidden, d), linear("down", d, hidden)
        generator = torch.Generator(DEVICE).manual_seed(7)
        cache = torch.randn(2, batch, heads, context, d // heads, device=DEVICE, generator=generator)
        self.register_buffer("cache", cache.bfloat16())
        self.register_buffer("position", torch.tensor([context - 1], device=DEVICE))

    def forward(self, x: Tensor) -> Tensor:
        queries, *fresh = self.qkv(F.rms_norm(x, (self.width,))).view(len(x), 3, self.heads, 1, -1).unbind(1)
        self.cache.index_copy_(3, self.position, torch.stack(fresh))
        mixed = F.scaled_dot_product_attention(queries, self.cache[0], self.cache[1])
        x = x + self.out(mixed.reshape(len(x), -1))
        gate, value = self.up(F.rms_norm(x, (self.width,))).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Weights:
    """The same random sparse weights for both models; formats are chosen at the first block, by measuring."""

    def __init__(self, sparsity: float, batch: int) -> None:
        self.sparsity, self.batch = sparsity, batch
        self.kinds: dict[str, nn.Module] = {}
        self.rows: list[Any] = []

    def dense(self, name: str, rows: int, columns: int) -> nn.Module:
        del name
        return DenseLinear(weight_of(rows, columns, self.sparsity) / columns**0.5)

    def sparse(self, name: str, dense: nn.Module) -> nn.Module:
        entries = from_dense(dense.weight)
        if name not in self.kinds:
            choice = choose(entries, batches=(self.batch,), name=name)
            self.kinds[name] = choice.layer
            self.rows += choice.rows
        like = self.kinds[name]
        if not isinstance(like, SparseLinear):
            return dense
        return SparseLinear(FORMATS[like.kind](entries), tiles=like.tiles, kind=like.kind)


def model(options: argparse.Namespace) -> dict[str, Any]:
    """A step of 8 blocks of d=4096, 11008 hidden, over 512 tokens: all dense against what `choose` keeps."""
    d, hidden, heads, context = (64, 96, 2, 8) if options.small else (4096, 11008, 32, 512)
    blocks = 1 if options.small else options.blocks
    weights = Weights(options.sparsity, options.batch)
    dense = nn.Sequential(*(Block(d, hidden, heads, options.batch, context, weights.dense) for _ in range(blocks)))
    sparse = nn.Sequential(*(as_sparse(block, weights, hidden, options.batch, context) for block in dense))
    print(table(weights.rows))
    x = torch.randn(options.batch, d, device=DEVICE, dtype=torch.bfloat16)
    error = float((sparse(x).float() - dense(x).float()).norm() / dense(x).float().norm())
    taken = {name: step_us(net, x) for name, net in (("dense", dense), ("sparse", sparse), ("dense again", dense))}
    for name, us in taken.items():
        print(f"{name:12} {us:9.1f} us a step")
    print(f"{taken['dense'] / taken['sparse']:.2f} times as fast; relative difference of the outputs {error:.1e}")
    return {"us": taken, "error": error, "layers": [dataclasses.asdict(row) for row in weights.rows]}


def as_sparse(block: Any, weights: Weights, hidden: int, batch: int, context: int) -> Block:
    def linear(name: str, rows: int, columns: int) -> nn.Module:
        del rows, columns
        return weights.sparse(name, getattr(block, name))

    return Block(block.width, hidden, block.heads, batch, context, linear)


def step_us(net: nn.Module, x: Tensor) -> float:
    if DEVICE.type != "cuda":
        return microseconds([lambda: net(x)], device=DEVICE)
    captured = Captured(net, x)
    assert torch.equal(captured(x).clone(), captured(x)), "two steps differ"
    return microseconds([lambda: net(x)], device=DEVICE, repeats=30)


if __name__ == "__main__":
    main()
