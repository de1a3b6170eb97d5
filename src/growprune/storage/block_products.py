# mypy: allow-untyped-calls
# torch.library has no types
"""Products of a `Linear` over the live blocks of its weight, where this is faster than a dense weight.

    output    y  = x W^T + bias
    input     dx = dy W
    values    dW = dy^T x, only its live values

On CUDA with Triton, in bfloat16 and float16. The first time a product is needed, both ways and several tiles are
measured with its own operands, for each shape, pattern, density in percent and number of tokens up to a power of two.
Another measurement may choose another way, which rounds differently. So with deterministic algorithms (torch's, or
cuDNN's, as in recipes) and inside a CUDA graph, a rule decides by the density alone. The environment variable
GROWPRUNE_BLOCK_PRODUCTS forces one way.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from growprune.errors import GrowpruneError
from growprune.storage import kernels
from growprune.storage.blocks import LiveBlocks

WAYS = ("measure", "sparse", "dense")
VARIABLE = "GROWPRUNE_BLOCK_PRODUCTS"
PAYS_BELOW = {32: 0.2, 64: 0.3}
"""The highest density at which the rule uses live blocks, by the smaller side of a block."""
REPEATS = 5
HAS_TRITON = importlib.util.find_spec("triton") is not None

CHOSEN: dict[tuple[Any, ...], Any] = {}
"""The measured tile of each product, or None if the dense way is faster. Measuring again would take time and memory."""

log = logging.getLogger(__name__)

WAY = os.environ.get(VARIABLE, "measure")
"""How layers with large blocks multiply: "measure" takes the faster way, "sparse" live blocks, "dense" the weight."""


def check_environment() -> None:
    """Raise if the environment variable has an unknown value."""
    if WAY not in WAYS:
        raise GrowpruneError(f"{VARIABLE} must be one of {', '.join(WAYS)}, got {WAY!r}")


def can_run(x: Tensor) -> bool:
    """True if products with x can use live blocks."""
    is_short = x.dtype in (torch.bfloat16, torch.float16)
    can = (WAY != "dense" and HAS_TRITON and is_short) if x.is_cuda else WAY == "sparse"
    # exporters and tracers get the error of the dense way
    return can and x.numel() > 0 and not (torch.compiler.is_exporting() or torch.jit.is_tracing())  # type: ignore[attr-defined]


def output(layout: Any, x: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """Return y for x (N, inputs), computed in the dtype of x."""
    run = _output if _is_direct(x) else torch.ops.growprune.block_output
    return run(x, values, bias, *_operands(layout, x))


def input_gradient(layout: Any, dy: Tensor, values: Tensor) -> Tensor:
    """Return dx for dy (N, outputs)."""
    run = _input_gradient if _is_direct(dy) else torch.ops.growprune.block_input
    return run(dy, values, *_operands(layout, dy))


def values_gradient(layout: Any, dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the live values of dW for dy (N, outputs) and x (N, inputs), in the given dtype."""
    run = _values_gradient if _is_direct(x) else torch.ops.growprune.block_values
    return run(dy, x, *_operands(layout, x), dtype)


def _is_direct(x: Tensor) -> bool:
    """True if the dispatcher can be bypassed, which takes as long as a kernel launch."""
    return x.is_cuda and kernels.is_plain()


def _operands(layout: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Sequence[int], int]:
    here = layout.to(x.device)
    return here.blocks.table, here.bits, here.offsets, here.blocks.sizes, here.group


def _output(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    table: Tensor,
    bits: Tensor,
    offsets: Tensor,
    sizes: Sequence[int],
    group: int,
) -> Tensor:
    def dense() -> Tensor:
        return F.linear(x, _dense_weight(values, x.dtype, bits, offsets, sizes, group), bias)

    if not x.is_cuda:
        return dense()
    from growprune.storage import triton_blocks

    x = x.contiguous()

    def sparse(tile: Any) -> Tensor:
        return triton_blocks.output(x, values.to(x.dtype), bias, table, sizes, tile)

    return _by_the_faster("output", LiveBlocks(table, tuple(sizes)), x, sparse, dense)  # type: ignore[arg-type]


def _input_gradient(
    dy: Tensor, values: Tensor, table: Tensor, bits: Tensor, offsets: Tensor, sizes: Sequence[int], group: int
) -> Tensor:
    def dense() -> Tensor:
        return dy @ _dense_weight(values, dy.dtype, bits, offsets, sizes, group)

    if not dy.is_cuda:
        return dense()
    from growprune.storage import triton_blocks

    dy = dy.contiguous()

    def sparse(tile: Any) -> Tensor:
        return triton_blocks.input_gradient(dy, values.to(dy.dtype), table, sizes, tile)

    return _by_the_faster("input", LiveBlocks(table, tuple(sizes)), dy, sparse, dense)  # type: ignore[arg-type]


def _values_gradient(
    dy: Tensor,
    x: Tensor,
    table: Tensor,
    bits: Tensor,
    offsets: Tensor,
    sizes: Sequence[int],
    group: int,
    dtype: torch.dtype,
) -> Tensor:
    def dense() -> Tensor:
        num_alive = sizes[2] * sizes[3] * sizes[4]
        return kernels._compress((dy.t() @ x).view(-1), bits, offsets, num_alive, dtype, group)

    if not x.is_cuda:
        return dense()
    from growprune.storage import triton_blocks

    dy, x = dy.contiguous(), x.contiguous()

    def sparse(tile: Any) -> Tensor:
        return triton_blocks.values_gradient(dy, x, table, sizes, dtype, tile)

    return _by_the_faster("values", LiveBlocks(table, tuple(sizes)), x, sparse, dense)  # type: ignore[arg-type]


def _dense_weight(
    values: Tensor, dtype: torch.dtype, bits: Tensor, offsets: Tensor, sizes: Sequence[int], group: int
) -> Tensor:
    shape = sizes[0] * sizes[3], sizes[1] * sizes[4]
    return kernels._expand(values, bits, offsets, shape[0] * shape[1], dtype, group).view(shape)


def _by_the_faster(
    product: str, blocks: LiveBlocks, x: Tensor, sparse: Callable[[Any], Tensor], dense: Callable[[], Tensor]
) -> Tensor:
    """Compute a product in the way chosen for it; choose now if it is the first of its kind."""
    wants_same_bits = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    key = (product, (x.shape[0] - 1).bit_length(), x.dtype, x.get_device(), *blocks.kind)
    if WAY == "sparse" or wants_same_bits:
        tile = _by_rule(product, blocks)
    elif key in CHOSEN:
        tile = CHOSEN[key]
    elif torch.cuda.is_current_stream_capturing():
        tile = _by_rule(product, blocks)
    else:
        tile = CHOSEN[key] = _measured(key, _tiles(product, blocks), sparse, dense)
    return dense() if tile is None else sparse(tile)


def _by_rule(product: str, blocks: LiveBlocks) -> Any:
    side = min(blocks.sizes[3:])
    most = max((density for size, density in PAYS_BELOW.items() if size <= side), default=0.0)
    return _tiles(product, blocks)[0] if WAY == "sparse" or blocks.density <= most else None


def _tiles(product: str, blocks: LiveBlocks) -> Sequence[Any]:
    from growprune.storage import triton_blocks

    return triton_blocks.tiles(product, *blocks.sizes[3:])


def _measured(
    key: tuple[Any, ...], tiles: Sequence[Any], sparse: Callable[[Any], Tensor], dense: Callable[[], Tensor]
) -> Any:
    """Return the fastest tile; None if the dense way is faster than all."""
    found: dict[Any, float] = {None: _milliseconds(dense)}
    for tile in tiles:
        try:
            found[tile] = _milliseconds(lambda tile=tile: sparse(tile))  # type: ignore[misc]
        except _failures() as error:
            log.warning("%s of blocks: %s cannot run here and is skipped: %s", key[0], tile, str(error)[:200])
    return min(found, key=lambda tile: found[tile])


def _failures() -> tuple[type[Exception], ...]:
    """Return the exceptions that Triton raises for a tile that does not compile or fit."""
    from triton.errors import TritonError

    return TritonError, RuntimeError


def _milliseconds(run: Callable[[], object]) -> float:
    """Measure the time on the GPU, without the first run, which may compile."""
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPEATS):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / REPEATS


_BITS = "Tensor table, Tensor bits, Tensor offsets, SymInt[] sizes, SymInt group"
kernels._register(
    f"block_output(Tensor x, Tensor values, Tensor? bias, {_BITS}) -> Tensor",
    _output,
    lambda x, values, bias, table, bits, offsets, sizes, group: x.new_empty(x.shape[0], sizes[0] * sizes[3]),
)
kernels._register(
    f"block_input(Tensor dy, Tensor values, {_BITS}) -> Tensor",
    _input_gradient,
    lambda dy, values, table, bits, offsets, sizes, group: dy.new_empty(dy.shape[0], sizes[1] * sizes[4]),
)
kernels._register(
    f"block_values(Tensor dy, Tensor x, {_BITS}, ScalarType dtype) -> Tensor",
    _values_gradient,
    lambda dy, x, table, bits, offsets, sizes, group, dtype: x.new_empty(sizes[2] * sizes[3] * sizes[4], dtype=dtype),
)
