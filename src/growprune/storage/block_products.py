# mypy: allow-untyped-calls
# torch.library has no types
"""Products of a `Linear` over the live blocks of its weight, where this is faster than a dense weight.

    output    y  = x W^T + bias
    input     dx = dy W
    values    dW = dy^T x, only its live values

On CUDA with Triton, in bfloat16 and float16, if few enough blocks are live (`LiveBlocks.pays`). The environment
variable GROWPRUNE_BLOCK_PRODUCTS forces one way.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from growprune.errors import GrowpruneError
from growprune.storage import kernels
from growprune.storage.blocks import LiveBlocks

WAYS = ("auto", "sparse", "dense")
VARIABLE = "GROWPRUNE_BLOCK_PRODUCTS"
HAS_TRITON = importlib.util.find_spec("triton") is not None

WAY = os.environ.get(VARIABLE, "auto")
"""How layers with large blocks multiply: "sparse" over live blocks, "dense" with the weight, "auto" by density."""


def check_environment() -> None:
    """Raise if the environment variable has an unknown value."""
    if WAY not in WAYS:
        raise GrowpruneError(f"{VARIABLE} must be one of {', '.join(WAYS)}, got {WAY!r}")


def can_run(blocks: LiveBlocks, x: Tensor) -> bool:
    """True if products with x use live blocks."""
    if x.is_cuda:
        is_short = x.dtype in (torch.bfloat16, torch.float16)
        can = HAS_TRITON and is_short and (WAY == "sparse" or (WAY == "auto" and blocks.pays))
    else:
        can = WAY == "sparse"
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
    if not x.is_cuda:
        return F.linear(x, _dense_weight(values, x.dtype, bits, offsets, sizes, group), bias)
    from growprune.storage import triton_blocks

    return triton_blocks.output(x.contiguous(), values.to(x.dtype), bias, table, sizes)


def _input_gradient(
    dy: Tensor, values: Tensor, table: Tensor, bits: Tensor, offsets: Tensor, sizes: Sequence[int], group: int
) -> Tensor:
    if not dy.is_cuda:
        return dy @ _dense_weight(values, dy.dtype, bits, offsets, sizes, group)
    from growprune.storage import triton_blocks

    return triton_blocks.input_gradient(dy.contiguous(), values.to(dy.dtype), table, sizes)


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
    if not x.is_cuda:
        num_alive = sizes[2] * sizes[3] * sizes[4]
        return kernels._compress((dy.t() @ x).view(-1), bits, offsets, num_alive, dtype, group)
    from growprune.storage import triton_blocks

    return triton_blocks.values_gradient(dy.contiguous(), x.contiguous(), table, sizes, dtype)


def _dense_weight(
    values: Tensor, dtype: torch.dtype, bits: Tensor, offsets: Tensor, sizes: Sequence[int], group: int
) -> Tensor:
    shape = sizes[0] * sizes[3], sizes[1] * sizes[4]
    return kernels._expand(values, bits, offsets, shape[0] * shape[1], dtype, group).view(shape)


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
