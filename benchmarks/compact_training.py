"""Training memory and step time of dense, masked and compact storage, side by side in one run.

    python benchmarks/compact_training.py blocks   # 8 Transformer blocks, d=4096: 1.6 B weights
    python benchmarks/compact_training.py blocks --graph   # the same, each step as a CUDA graph
    python benchmarks/compact_training.py blocks --alternate   # all three at once, a step of each in turn: times only
    python benchmarks/compact_training.py resnet50   # batch 256, bf16
    python benchmarks/compact_training.py large --billions 40 --text input.txt   # 40 B weights on one card

"sharded" among `--storages`, and `large --shard`, is compact storage under FSDP2 on one rank, as `sparse.shard(mesh)`
has it: a group for each block, float32, gathered again for the backward pass. Others are in SHARDED.
`--small` runs the same on a CPU in seconds, to see that it works. `--json FILE` keeps the figures.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import LanguageModel
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import growprune as gp
from growprune.plan import By, Part
from growprune.tasks.classification.resnet import ResNet

GIB = 2**30
IN_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SHARDED: dict[str, dict[str, Any]] = {
    "sharded": {},
    "sharded-bf16": {"mp_policy": IN_BF16},
    "sharded-kept": {"mp_policy": IN_BF16, "reshard_after_forward": False},
    "sharded-whole": {"mp_policy": IN_BF16, "reshard_after_forward": False, "units": []},
}
"""How models are sharded, by name: gathered in bf16; not gathered again for the backward pass; as one group.

In bf16 live values are rounded before they are sent, as autocast would after it, and so are the gradients of the dense
part. What stays gathered takes 2 bytes a live value.
"""


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


def peak_gib(*, reset: bool = False) -> float:
    """The most GPU memory in use since the last reset."""
    if device().type != "cuda":
        return float("nan")
    peak = torch.cuda.max_memory_allocated() / GIB
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return peak


def fused() -> dict[str, bool]:
    return {"fused": True} if device().type == "cuda" else {}


def autocast() -> Any:
    # without the cache: it would keep a second, bf16 copy of all dense weights alive through the step
    return torch.autocast(device().type, torch.bfloat16, cache_enabled=False)


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    with autocast():
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def median_seconds(step: Callable[[], object], times: int) -> float:
    return statistics.median(seconds_in_turn({"": step}, times)[""])


def seconds_in_turn(steps: dict[str, Callable[[], object]], times: int) -> dict[str, list[float]]:
    """What steps take, one of each in turn, so that a host that slows down slows all of them."""
    for step in [*steps.values()] * 3:
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for name in [*steps] * times:
        wait()
        start = time.perf_counter()
        steps[name]()
        wait()
        seconds[name].append(time.perf_counter() - start)
    return seconds


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """The step as a CUDA graph, which the GPU runs without waiting for Python; itself where there is no GPU."""
    if device().type != "cuda":
        return step
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@functools.cache
def one_rank() -> Any:
    """A mesh of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(
        "nccl" if device().type == "cuda" else "gloo", store=store, rank=0, world_size=1
    )
    return torch.distributed.device_mesh.init_device_mesh(device().type, (1,))


def sparse_with_one_part_grown(storage: str, build: Callable[[], nn.Module], kappa: int, **settings: Any) -> Any:
    """A model as it is in the middle of C-GaP: one of kappa parts dense, the others sparse."""
    if storage == "compact":
        sparse = gp.sparse_init(build, sparsity=0.9, device=device(), **settings)
    elif storage in SHARDED:
        sparse = gp.sparse_init(build, sparsity=0.9, mesh=one_rank(), sharding=SHARDED[storage], **settings)
    else:
        with device():
            model = build()
        sparse = gp.SparseModel(model, sparsity=0.9, storage=storage, **settings)
        sparse.prune(by=By.RANDOM)
    parts = gp.Partition.contiguous(sparse.model, kappa)
    sparse.grow(parts[0])
    return sparse, parts


@dataclass
class Trained:
    """A model, what trains it, and, if it is sparse, its masks and parts."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    sparse: Any = None
    parts: Any = None

    def step(self, loss: Callable[[nn.Module], Tensor]) -> None:
        loss(self.model).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def prepare(
    storage: str, build: Callable[[], nn.Module], optimizer: Callable[..., Any], *, is_compiled: bool, **settings: Any
) -> Trained:
    torch.manual_seed(0)
    sparse = parts = None
    if storage == "dense":
        with device():
            model = build()
    else:
        sparse, parts = sparse_with_one_part_grown(storage, build, 4, **settings)
        model = sparse.model
    for block in model.blocks if is_compiled else ():
        block.compile(dynamic=False)
    trained = Trained(model, optimizer(model.parameters()), sparse, parts)
    if sparse is not None:
        sparse.attach(trained.optimizer)
    return trained


def measure(
    storage: str,
    build: Callable[[], nn.Module],
    optimizer: Callable[..., Any],
    steps: Any,
    *,
    is_captured: bool,
    repeats: int,
    **settings: Any,
) -> dict[str, float]:
    """Peak memory and step time of one storage, for each kind of step."""
    gc.collect()
    peak_gib(reset=True)
    trained = prepare(storage, build, optimizer, **settings)
    found: dict[str, float] = {}
    peak_gib(reset=True)
    for name, loss in steps.items():
        step = functools.partial(trained.step, loss)
        found[f"{name} ms"] = 1000 * median_seconds(captured(step) if is_captured else step, repeats)
        found[f"{name} GiB"] = peak_gib(reset=True)
    if storage != "dense":
        trained.sparse.prune(trained.parts[0])
        trained.sparse.grow(trained.parts[1])
        wait()
        found["edits GiB"] = peak_gib(reset=True)
    return found


def in_turn(
    build: Callable[[], nn.Module],
    optimizer: Any,
    steps: Any,
    *,
    storages: list[str],
    is_captured: bool,
    repeats: int,
    **settings: Any,
) -> dict[str, Any]:
    """Step times of all storages, which are in memory at once."""
    trained = {storage: prepare(storage, build, optimizer, **settings) for storage in storages}
    found: dict[str, Any] = {storage: {} for storage in storages}
    for name, loss in steps.items():
        each = {storage: functools.partial(one.step, loss) for storage, one in trained.items()}
        each = {storage: captured(step) if is_captured else step for storage, step in each.items()}
        for storage, seconds in seconds_in_turn(each, repeats).items():
            found[storage][f"{name} ms"] = 1000 * statistics.median(seconds)
            found[storage][f"{name} all ms"] = [round(1000 * one, 3) for one in seconds]
        ratios = {storage: found[storage][f"{name} ms"] / found[storages[0]][f"{name} ms"] for storage in storages}
        print(name, {s: f"{found[s][f'{name} ms']:.2f} ms ({ratios[s]:.3f}x)" for s in storages}, flush=True)
    return found


def side_by_side(
    build: Callable[[], nn.Module], optimizer: Any, steps: Any, *, storages: list[str], **settings: Any
) -> dict[str, Any]:
    rows = {}
    for storage in storages:
        rows[storage] = measure(storage, build, optimizer, steps, **settings)
        print(storage, {name: round(figure, 2) for name, figure in rows[storage].items()}, flush=True)
    names = list(rows[storages[-1]])
    print("| storage | " + " | ".join(names) + " |\n|---|" + "---:|" * len(names))
    for storage, row in rows.items():
        cells = []
        for name in names:
            base = rows["dense"].get(name)
            ratio = f" ({row[name] / base:.3f}x)" if name in row and base else ""
            cells.append(f"{row[name]:.2f}{ratio}" if name in row else "")
        print(f"| {storage} | " + " | ".join(cells) + " |")
    return rows


def blocks(args: argparse.Namespace) -> dict[str, Any]:
    num_blocks, d, lengths = (8, 4096, (8192, 1024)) if not args.small else (4, 64, (64, 16))

    def build() -> nn.Module:
        return LanguageModel(num_blocks, d, d // 128 or 1)

    def loss_on(length: int) -> Callable[[nn.Module], Tensor]:
        tokens = torch.randint(256, (max(1, length // 1024), min(length, 1024) + 1), device=device())
        return lambda model: next_token_loss(model, tokens)

    steps = {f"{length} tokens": loss_on(length) for length in lengths}
    return (in_turn if args.alternate else side_by_side)(
        build,
        lambda p: torch.optim.AdamW(p, 1e-4, **fused(), capturable=device().type == "cuda"),
        steps,
        storages=args.storages,
        is_compiled=args.compile,
        is_captured=args.graph,
        repeats=args.repeats,
        keep_dense=["head"],
    )


def resnet(args: argparse.Namespace) -> dict[str, Any]:
    batch, size = (256, 224) if not args.small else (2, 64)
    x = torch.randn(batch, 3, size, size, device=device()).to(memory_format=torch.channels_last)
    y = torch.randint(1000, (batch,), device=device())

    def build() -> nn.Module:
        return ResNet("resnet50")

    def loss(model: nn.Module) -> Tensor:
        with autocast():
            return F.cross_entropy(model(x), y)

    torch.backends.cudnn.benchmark = True
    return side_by_side(
        build,
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        {f"batch {batch}": loss},
        storages=args.storages,
        is_compiled=False,
        is_captured=False,
        repeats=args.repeats,
        keep_dense=["conv1", "fc"],
    )


def batches(text: Path | None, length: int, batch: int) -> Iterator[Tensor]:
    """Random pieces of a text, as bytes."""
    data = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8) if text else torch.arange(5000) % 97
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(data) - length - 1, (batch,), generator=generator)
        yield torch.stack([data[s : s + length + 1] for s in starts]).long().to(device())


def step_in_backward(sparse: Any, lr: float) -> list[Any]:
    """One AdamW for each parameter, that steps as soon as its gradient is there and then frees it.

    They live as long as the handles that are returned are not removed.
    """
    handles = []
    for parameter in sparse.model.parameters():
        optimizer = sparse.attach(torch.optim.AdamW([parameter], lr, **fused()))

        def step(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        handles.append(parameter.register_post_accumulate_grad_hook(step))
    return handles


def large(args: argparse.Namespace) -> dict[str, Any]:
    """C-GaP by hand: one block dense at a time, `--changes` changes of the dense block, `--steps` steps in each."""
    num_blocks, d, length = (round(args.billions / 0.8), 8192, 1024) if not args.small else (6, 64, 32)
    start = time.perf_counter()
    torch.manual_seed(0)
    where = {"mesh": one_rank(), "sharding": SHARDED[args.shard]} if args.shard else {"device": device()}
    sparse = gp.sparse_init(
        lambda: LanguageModel(num_blocks, d, d // 128 or 1), sparsity=0.9, keep_dense=["head"], **where
    )
    wait()
    built, built_peak = time.perf_counter() - start, peak_gib(reset=True)
    print(f"{sparse.num_prunable:,} prunable weights, {sparse.num_alive:,} alive; built in {built:.0f} s", flush=True)
    names = [weight.parameter for weight in sparse.weights]
    blocks = [
        Part(f"block {i}", tuple(n for n in names if n.startswith(f"blocks.{i}."))) for i in range(args.changes + 1)
    ]
    text, losses, seconds, edits = batches(args.text, length, 1), [], [], []
    for i, block in enumerate(blocks):
        before = time.perf_counter()
        if i:
            sparse.prune(blocks[i - 1])
        sparse.grow(block)
        wait()
        edits.append(time.perf_counter() - before)
        handles = step_in_backward(sparse, 3e-5)
        for _ in range(args.steps):
            before = time.perf_counter()
            loss = next_token_loss(sparse.model, next(text))
            loss.backward()
            losses.append(float(loss.detach()))
            seconds.append(time.perf_counter() - before)
        told = f"loss {losses[-args.steps]:.3f} to {losses[-1]:.3f}, {sparse.num_alive:,} alive"
        print(f"{block.name} dense: {told}, {peak_gib():.1f} GiB so far", flush=True)
        for handle in handles:
            handle.remove()
    peak = max(built_peak, peak_gib())
    dense = 16 * sparse.num_prunable / GIB
    found = {"weights": sparse.num_prunable, "peak GiB": peak, "dense AdamW GiB": dense, "losses": losses}
    found |= {"build s": built, "build GiB": built_peak, "step s": statistics.median(seconds), "edit s": edits}
    print(f"peak {peak:.1f} GiB (dense AdamW: {dense:.0f} GiB before activations), {found['step s']:.2f} s a step")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["blocks", "resnet50", "large"])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--compile", action="store_true", help="blocks: torch.compile each block")
    parser.add_argument("--graph", action="store_true", help="blocks: run each step as a CUDA graph")
    parser.add_argument("--alternate", action="store_true", help="blocks: a step of each storage in turn")
    storages = ["dense", "masked", "compact", *SHARDED]
    parser.add_argument("--storages", nargs="+", default=storages[:3], choices=storages, help="dense first")
    parser.add_argument("--shard", nargs="?", const="sharded", choices=[*SHARDED], help="large: under FSDP2")
    parser.add_argument("--billions", type=float, default=40, help="large: how many weights, in blocks of 0.8 billion")
    parser.add_argument("--changes", type=int, default=2, help="large: changes of the dense block")
    parser.add_argument("--steps", type=int, default=12, help="large: steps between two changes")
    parser.add_argument("--repeats", type=int, default=15, help="blocks, resnet50: steps to take the median of")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--threads", action="store_true", help="let backward passes run in a thread of autograd's own")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.autograd.set_multithreading_enabled(args.threads)  # as growprune's own loop has it, for dense models too
    found = {"blocks": blocks, "resnet50": resnet, "large": large}[args.what](args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
