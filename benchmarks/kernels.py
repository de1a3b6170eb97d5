"""Time `expand`, `compress` and `zero_off` against what torch offers for the same job.

python benchmarks/kernels.py [--weights N] [--sparsity 0.9]

"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from growprune.storage.kernels import block_offsets, can_zero_off, compress, expand, pack, zero_off

Job = tuple[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--weights", type=int, help="default: 8192 x 8192 on CUDA, 4096 x 4096 on the CPU")
    parser.add_argument("--sparsity", type=float, default=0.9)
    options = parser.parse_args()
    n = options.weights or (8192 if options.device == "cuda" else 4096) ** 2
    compute = torch.bfloat16 if options.device == "cuda" else torch.float32
    print(f"{n} weights, {options.sparsity:.0%} sparse, float32 values, {compute} compute, {options.device}")
    for group in (1, 8):
        print_table(f"group of {group}", jobs(n, options.sparsity, group, options.device, compute), options.device)
    if can_zero_off(torch.device(options.device)):
        for dtype in (torch.int32, torch.int16):
            zero_table(n, options.sparsity, dtype)


def jobs(n: int, sparsity: float, group: int, device: str, compute: torch.dtype) -> list[Job]:
    torch.manual_seed(0)
    mask = (torch.rand(n // group, device=device) >= sparsity).repeat_interleave(group)
    bits = pack(mask, group=group)
    offsets, num_live = block_offsets(bits)
    values, dense = torch.randn(num_live * group, device=device), torch.randn(n, device=device)
    gradient = dense.to(compute)
    nnz, single = values.numel(), torch.float32
    return [
        ("cast all of a dense float32 tensor", lambda: dense.to(torch.bfloat16)),
        ("copy a dense tensor in the compute dtype", gradient.clone),
        ("expand", lambda: expand(values, bits, offsets, n, dtype=compute, group=group)),
        ("    masked_scatter", lambda: masked_scatter(values, mask, compute)),
        ("    boolean indexing", lambda: index_put(values, mask, compute)),
        ("compress", lambda: compress(gradient, bits, offsets, nnz, dtype=single, group=group)),
        ("    masked_select", lambda: gradient.masked_select(mask).float()),
        ("    boolean indexing", lambda: gradient[mask].float()),
    ]


def zero_table(n: int, sparsity: float, dtype: torch.dtype) -> None:
    """Terabytes a second, counted as if everything were read and written; the same tensor times a bool mask beside."""
    tensor = torch.randint(1, 100, (n,), dtype=dtype, device="cuda")
    mask = torch.rand(n, device="cuda") >= sparsity
    bits, size = pack(mask), 2e-9 * n * tensor.element_size()
    print(f"\n{dtype}, times a bool mask: {size / milliseconds(lambda: tensor.mul_(mask), 'cuda'):.2f} TB/s")
    print(f"zero_off: {size / milliseconds(lambda: zero_off(tensor, bits), 'cuda'):.2f} TB/s")


def masked_scatter(values: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_scatter_(mask, values.to(dtype))


def index_put(values: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    dense = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    dense[mask] = values.to(dtype)
    return dense


def print_table(title: str, timed: list[Job], device: str) -> None:
    baseline = milliseconds(timed[0][1], device)
    print(f"\n{title:42} {'ms':>9} {'x cast':>9}")
    for name, run in timed:
        taken = milliseconds(run, device)
        print(f"{name:42} {taken:9.3f} {taken / baseline:9.2f}")


def milliseconds(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        from triton.testing import do_bench  # empties the cache before each call, as the layers between two uses do

        return float(do_bench(run, warmup=5, rep=30, return_mode="median"))
    threads = torch.get_num_threads()
    return Timer("run()", globals={"run": run}, num_threads=threads).blocked_autorange(min_run_time=0.2).median * 1e3


if __name__ == "__main__":
    main()
