# mypy: allow-untyped-calls
# torch.library has no types
"""Products of a `Linear` over the live blocks of its weight, where this is faster than a dense weight.

    output    y  = x W^T + bias
    input     dx = dy W
    values    dW = dy^T x, only its live values

On CUDA with Triton, in bfloat16 and float16, if few enough blocks are live (`LiveBlocks.pays`). The environment
variable GROWPRUNE_BLOCK_PRODUCTS forces one way.

For `Linear` layers whose pattern has blocks of a x b, both multiples of 32, that divide the weight evenly. The live
values of compact storage are in row-major order: a row of the weight has the rows of its live blocks one after another,
here called pieces, of b values each. The positions are one flat int32 tensor, recomputed after each edit. With R block
rows, C block columns and n live blocks, numbered row by row:

    R + 1   for each block row, its first live block, and at last n
    C + 1   for each block column, its first in the order column by column, and at last n
    n       row by row: block columns
    n       row by row: block rows
    n       column by column: block rows
    n       column by column: the piece that is a block's first row
    n       column by column: how many pieces further its next row is
    1       unused, so that a lookup of the next block is valid after the last one
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from growprune.errors import GrowpruneError
from growprune.masks.patterns import Block, Pattern
from growprune.storage import kernels

WAYS = ("auto", "sparse", "dense")
log = logging.getLogger(__name__)
HAS_TRITON = importlib.util.find_spec("triton") is not None

WAY = os.environ.get("GROWPRUNE_BLOCK_PRODUCTS", "auto")
"""How layers with large blocks multiply: "sparse" over live blocks, "dense" with the weight, "auto" by density."""

PAYS_BELOW = {32: 0.2, 64: 0.3}
"""The highest density at which products use live blocks, by the smaller side of a block."""


@dataclass(eq=False)
class LiveBlocks:
    """The positions of the live blocks of a matrix."""

    table: Tensor
    sizes: tuple[int, int, int, int, int]
    """Block rows, block columns, live blocks, and height and width of a block."""

    def __post_init__(self) -> None:
        block_rows, block_columns, num_blocks, height, width = self.sizes
        most = max((density for size, density in PAYS_BELOW.items() if size <= min(height, width)), default=0.0)
        self.pays = num_blocks <= most * block_rows * block_columns
        """True if products over live blocks are faster than with the dense weight."""

    def to(self, device: torch.device) -> LiveBlocks:
        return LiveBlocks(self.table.to(device), self.sizes)


def block_of(pattern: Pattern, name: str, shape: torch.Size) -> tuple[int, int] | None:
    """Return the height and width of a weight's blocks if there are products for them, else None."""
    height, width = pattern.height, pattern.width
    if not isinstance(pattern, Block) or len(shape) != 2 or height % 32 or width % 32:
        return None
    if shape[0] % height == 0 and shape[1] % width == 0:
        return height, width
    fitting = [f"{side}x{side}" for side in (128, 64, 32) if shape[0] % side == 0 and shape[1] % side == 0]
    log.warning(
        "%s is %dx%d, which blocks of %s do not divide evenly: its products stay dense; %s",
        *(name, *shape, pattern.name),
        f"{' and '.join(fitting)} would fit" if fitting else "no large blocks would fit",
    )
    return None


def live_blocks(mask: Tensor, height: int, width: int) -> LiveBlocks | None:
    """Return the positions of the live blocks of a mask; None if it splits a block."""
    block_rows, block_columns = mask.shape[0] // height, mask.shape[1] // width
    counts = mask.view(block_rows, height, block_columns, width).sum((1, 3))
    alive = counts > 0
    if not torch.equal(counts, alive * (height * width)):
        return None
    rows, columns = alive.nonzero(as_tuple=True)
    columns_down, rows_down = alive.t().nonzero(as_tuple=True)
    in_row, rank = alive.sum(1), alive.cumsum(1) - 1  # live blocks of each row, and those before each block
    row_starts, column_starts = (F.pad(counts.cumsum(0), (1, 0)) for counts in (in_row, alive.sum(0)))
    firsts = row_starts[rows_down] * height + rank[rows_down, columns_down]
    nothing = row_starts.new_zeros(1)
    parts = (row_starts, column_starts, columns, rows, rows_down, firsts, in_row[rows_down], nothing)
    sizes = (block_rows, block_columns, rows.numel(), height, width)
    return LiveBlocks(torch.cat(parts).to(torch.int32), sizes)


def check_environment() -> None:
    if WAY not in WAYS:
        raise GrowpruneError(f"GROWPRUNE_BLOCK_PRODUCTS must be one of {', '.join(WAYS)}, got {WAY!r}")


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
    return _run(_output, torch.ops.growprune.block_output, layout, x, values, bias)


def input_gradient(layout: Any, dy: Tensor, values: Tensor) -> Tensor:
    """Return dx for dy (N, outputs)."""
    return _run(_input_gradient, torch.ops.growprune.block_input, layout, dy, values)


def values_gradient(layout: Any, dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the live values of dW for dy (N, outputs) and x (N, inputs), in the given dtype."""
    return _run(_values_gradient, torch.ops.growprune.block_values, layout, dy, x, dtype)


def _run(kernel: Any, operator: Any, layout: Any, first: Tensor, *rest: Any) -> Tensor:
    """Bypass the dispatcher where nothing listens to it, because it takes as long as a kernel launch."""
    run, here = kernel if first.is_cuda and kernels.is_plain() else operator, layout.to(first.device)
    result: Tensor = run(first, *rest, here.blocks.table, here.blocks.sizes, here.bits, here.offsets, here.group)
    return result


def _output(
    x: Tensor, values: Tensor, bias: Tensor | None, table: Tensor, sizes: Sequence[int], *layout: Any
) -> Tensor:
    if not x.is_cuda:
        return F.linear(x, _dense_weight(values, x.dtype, sizes, *layout), bias)
    from growprune.storage import triton_blocks

    return triton_blocks.output(x.contiguous(), values.to(x.dtype), bias, table, sizes)


def _input_gradient(dy: Tensor, values: Tensor, table: Tensor, sizes: Sequence[int], *layout: Any) -> Tensor:
    if not dy.is_cuda:
        return dy @ _dense_weight(values, dy.dtype, sizes, *layout)
    from growprune.storage import triton_blocks

    return triton_blocks.input_gradient(dy.contiguous(), values.to(dy.dtype), table, sizes)


def _values_gradient(
    dy: Tensor, x: Tensor, dtype: torch.dtype, table: Tensor, sizes: Sequence[int], *layout: Any
) -> Tensor:
    if not x.is_cuda:
        (bits, offsets, group), num_alive = layout, sizes[2] * sizes[3] * sizes[4]
        return kernels._compress((dy.t() @ x).view(-1), bits, offsets, num_alive, dtype, group)
    from growprune.storage import triton_blocks

    return triton_blocks.values_gradient(dy.contiguous(), x.contiguous(), table, sizes, dtype)


def _dense_weight(
    values: Tensor, dtype: torch.dtype, sizes: Sequence[int], bits: Tensor, offsets: Tensor, group: int
) -> Tensor:
    shape = sizes[0] * sizes[3], sizes[1] * sizes[4]
    return kernels._expand(values, bits, offsets, shape[0] * shape[1], dtype, group).view(shape)


_BITS = "Tensor table, SymInt[] sizes, Tensor bits, Tensor offsets, SymInt group"
kernels._register(
    f"block_output(Tensor x, Tensor values, Tensor? bias, {_BITS}) -> Tensor",
    _output,
    lambda x, values, bias, table, sizes, *_: x.new_empty(x.shape[0], sizes[0] * sizes[3]),
)
kernels._register(
    f"block_input(Tensor dy, Tensor values, {_BITS}) -> Tensor",
    _input_gradient,
    lambda dy, values, table, sizes, *_: dy.new_empty(dy.shape[0], sizes[1] * sizes[4]),
)
kernels._register(
    f"block_values(Tensor dy, Tensor x, ScalarType dtype, {_BITS}) -> Tensor",
    _values_gradient,
    lambda dy, x, dtype, table, sizes, *_: x.new_empty(sizes[2] * sizes[3] * sizes[4], dtype=dtype),
)
