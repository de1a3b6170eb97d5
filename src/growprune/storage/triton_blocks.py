# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# Triton has no types, and what a kernel takes is none of Python's
"""The three products of a `Linear` whose weight lives in large blocks, in Triton, over live blocks only.

The values of compact storage lie in row-major order. So a row of the weight has the rows of its live blocks one after
another, and a block is a plain matrix with a stride: the number of live blocks beside it times its width. The table
that says where they are is one flat int32 tensor; `growprune.storage.block_products` describes it.

Every tile of a result belongs to one program, which adds up in a fixed order in float32: the same bits each time.
Programs that read the same tokens run side by side, as the second axis of the grid, of tokens, is the slow one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from growprune.storage.triton_kernels import launch


class Tile(NamedTuple):
    """The sizes with which one program computes a product."""

    rows: int
    """Of its tile of the result: tokens; of the weight's gradient, outputs."""
    columns: int
    depth: int
    """How much of the sum it takes in one step."""
    num_warps: int
    num_stages: int
    """How many steps are loaded ahead, and one."""


def output(x: Tensor, values: Tensor, bias: Tensor | None, table: Tensor, sizes) -> Tensor:
    """y = x W^T + bias, for x of (N, inputs); `sizes` are block rows, block columns, live blocks, height, width."""
    block_rows, _, _, height, width = sizes
    tile = tile_of_tokens(height, width)
    y = torch.empty(x.shape[0], block_rows * height, dtype=x.dtype, device=x.device)
    grid = (y.shape[1] // tile.columns, -(-x.shape[0] // tile.rows), 1)
    numbers = (x.shape[0], x.stride(0), *sizes, *tile[:3], int(bias is not None))
    tensors = (x, values, values if bias is None else bias, table, y)
    launch(_output_kernel, grid, tensors, numbers, num_warps=tile.num_warps, num_stages=tile.num_stages)
    return y


def input_gradient(dy: Tensor, values: Tensor, table: Tensor, sizes) -> Tensor:
    """dx = dy W."""
    _, block_columns, _, height, width = sizes
    tile = tile_of_tokens(width, height)
    dx = torch.empty(dy.shape[0], block_columns * width, dtype=dy.dtype, device=dy.device)
    grid = (dx.shape[1] // tile.columns, -(-dy.shape[0] // tile.rows), 1)
    numbers = (dy.shape[0], dy.stride(0), *sizes, *tile[:3])
    launch(_input_kernel, grid, (dy, values, table, dx), numbers, num_warps=tile.num_warps, num_stages=tile.num_stages)
    return dx


def values_gradient(dy: Tensor, x: Tensor, table: Tensor, sizes, dtype: torch.dtype) -> Tensor:
    """The live values of dW = dy^T x."""
    block_rows, block_columns, num_blocks, height, width = sizes
    tile = tile_of_values(height, width)
    gradient = torch.empty(num_blocks * height * width, dtype=dtype, device=x.device)
    if num_blocks:
        if tile.columns <= width:
            kernel, grid = _values_kernel, (num_blocks * (height // tile.rows) * (width // tile.columns), 1, 1)
        else:  # some of these programs find nothing to do, and end at once
            kernel = _neighbours_kernel
            grid = (-(-block_columns // (tile.columns // width)), block_rows * (height // tile.rows), 1)
        is_even = int(x.shape[0] % tile.depth == 0)
        numbers = (x.shape[0], dy.stride(0), x.stride(0), *sizes, *tile[:3], is_even)
        tensors = (dy, x, table, gradient)
        launch(kernel, grid, tensors, numbers, num_warps=tile.num_warps, num_stages=tile.num_stages)
    return gradient


def tile_of_tokens(across: int, along: int) -> Tile:
    """Return the tile of "output" and "input", for the side of a block that the result has, and the one summed over."""
    if across % 64:
        return Tile(256, 32, _part(along, 64), 4, 4)
    return Tile(128, _part(across, 128), _part(along, 64), 4, 3)


def tile_of_values(height: int, width: int) -> Tile:
    """Return the tile of "values": rows are outputs, columns inputs."""
    if width in (32, 64):  # several neighbours at a time
        return Tile(_part(height, 64), 128, 64, 4, 3 if width == 32 else 4)
    side = min(_part(height, 128), _part(width, 128))
    return Tile(side, side, 128 if side == 32 else 64, 4, 4 if side == 128 else 3)


def _part(size: int, most: int) -> int:
    """The largest power of two that divides a size and is not above `most`."""
    return min(size & -size, most)


@triton.jit(do_not_specialize=["num_blocks"])
def _output_kernel(
    x,
    values,
    bias,
    table,
    y,
    num_tokens,
    x_stride,
    block_rows,
    block_columns,
    num_blocks,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    parts: tl.constexpr = HEIGHT // OUTPUTS
    steps: tl.constexpr = WIDTH // INPUTS
    block_row = tl.program_id(0) // parts
    inner = tl.arange(0, INPUTS)
    output = (tl.program_id(0) % parts) * OUTPUTS + tl.arange(0, OUTPUTS)  # in the block
    begin = tl.load(table + block_row)
    count = tl.load(table + block_row + 1) - begin
    columns = table + block_rows + block_columns + 2 + begin
    token, x_at = _tokens(x, x_stride, num_tokens, inner, TOKENS)
    piece = begin.to(tl.int64) * HEIGHT + output * count
    w_at = values + piece[:, None] * WIDTH + inner[None, :]
    total = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    column = tl.load(columns)
    for step in range(0, count * steps):
        xs = tl.load(x_at + (column * WIDTH + (step % steps) * INPUTS))
        ws = tl.load(w_at + step * INPUTS)  # the row's live blocks lie side by side
        total = tl.dot(xs, tl.trans(ws), total)
        # for the next step: if a step looked it up for itself, half of the stages would go into waiting for that
        column = tl.load(columns + (step + 1) // steps)
    place = block_row * HEIGHT + output
    if HAS_BIAS:
        total += tl.load(bias + place).to(tl.float32)[None, :]
    _store(y, block_rows * HEIGHT, token, num_tokens, place, total)


@triton.jit(do_not_specialize=["num_blocks"])
def _input_kernel(
    dy,
    values,
    table,
    dx,
    num_tokens,
    dy_stride,
    block_rows,
    block_columns,
    num_blocks,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    parts: tl.constexpr = WIDTH // INPUTS
    steps: tl.constexpr = HEIGHT // OUTPUTS
    block_column = tl.program_id(0) // parts
    inner = tl.arange(0, OUTPUTS)
    input = (tl.program_id(0) % parts) * INPUTS + tl.arange(0, INPUTS)  # in the block
    begin = tl.load(table + block_rows + 1 + block_column)
    count = tl.load(table + block_rows + 2 + block_column) - begin
    rows = table + block_rows + block_columns + 2 + num_blocks * 2 + begin
    token, dy_at = _tokens(dy, dy_stride, num_tokens, inner, TOKENS)
    w_at = values + input[None, :]
    total = tl.zeros((TOKENS, INPUTS), tl.float32)
    row = tl.load(rows)
    first = tl.load(rows + num_blocks)
    stride = tl.load(rows + num_blocks * 2)
    for step in range(0, count * steps):
        output = (step % steps) * OUTPUTS
        gs = tl.load(dy_at + (row * HEIGHT + output))
        piece = first.to(tl.int64) + (output + inner) * stride
        ws = tl.load(w_at + piece[:, None] * WIDTH)
        total = tl.dot(gs, ws, total)
        entry = rows + (step + 1) // steps  # as above
        row = tl.load(entry)
        first = tl.load(entry + num_blocks)
        stride = tl.load(entry + num_blocks * 2)
    _store(dx, block_columns * WIDTH, token, num_tokens, block_column * WIDTH + input, total)


@triton.jit(do_not_specialize=["num_blocks"])
def _values_kernel(
    dy,
    x,
    table,
    gradient,
    num_tokens,
    dy_stride,
    x_stride,
    block_rows,
    block_columns,
    num_blocks,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    EVEN: tl.constexpr,
):
    across: tl.constexpr = WIDTH // INPUTS
    parts: tl.constexpr = HEIGHT // OUTPUTS * across
    block = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    output = (part // across) * OUTPUTS + tl.arange(0, OUTPUTS)  # in the block
    input = (part % across) * INPUTS + tl.arange(0, INPUTS)
    columns = table + block_rows + block_columns + 2
    column = tl.load(columns + block)
    row = tl.load(columns + num_blocks + block)
    output_at, input_at = row * HEIGHT + output, column * WIDTH + input
    total = _sum_over_tokens(dy, x, output_at, input_at, num_tokens, dy_stride, x_stride, TOKENS, EVEN)
    begin = tl.load(table + row)
    count = tl.load(table + row + 1) - begin
    piece = begin.to(tl.int64) * HEIGHT + (block - begin) + output * count
    tl.store(gradient + piece[:, None] * WIDTH + input[None, :], total.to(gradient.dtype.element_ty))


@triton.jit(do_not_specialize=["num_blocks"])
def _neighbours_kernel(
    dy,
    x,
    table,
    gradient,
    num_tokens,
    dy_stride,
    x_stride,
    block_rows,
    block_columns,
    num_blocks,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The same for a few live neighbours of a block row at a time, which share what is read of dy."""
    parts: tl.constexpr = HEIGHT // OUTPUTS
    row = tl.program_id(1) // parts
    begin = tl.load(table + row)
    count = tl.load(table + row + 1) - begin
    first = tl.program_id(0) * (INPUTS // WIDTH)
    if first >= count:
        return
    output = (tl.program_id(1) % parts) * OUTPUTS + tl.arange(0, OUTPUTS)  # in the block
    across = tl.arange(0, INPUTS)
    rank = first + across // WIDTH
    # past the last neighbour the last one is read again, and not stored
    column = tl.load(table + block_rows + block_columns + 2 + begin + tl.minimum(rank, count - 1))
    input = tl.max_contiguous(tl.multiple_of(column * WIDTH + across % WIDTH, WIDTH), WIDTH)
    total = _sum_over_tokens(dy, x, row * HEIGHT + output, input, num_tokens, dy_stride, x_stride, TOKENS, EVEN)
    piece = begin.to(tl.int64) * HEIGHT + first + output * count
    exists = (rank < count)[None, :]
    tl.store(gradient + piece[:, None] * WIDTH + across[None, :], total.to(gradient.dtype.element_ty), mask=exists)


@triton.jit
def _sum_over_tokens(dy, x, output, input, num_tokens, dy_stride, x_stride, TOKENS: tl.constexpr, EVEN: tl.constexpr):
    """dy^T x for some outputs and inputs."""
    token = tl.arange(0, TOKENS)
    dy_at = dy + token[:, None] * dy_stride + output[None, :]
    x_at = x + token[:, None] * x_stride + input[None, :]
    dy_step = tl.cast(dy_stride, tl.int64) * TOKENS
    x_step = tl.cast(x_stride, tl.int64) * TOKENS
    total = tl.zeros((output.shape[0], input.shape[0]), tl.float32)
    for start in range(0, num_tokens, TOKENS):
        if EVEN:
            gs = tl.load(dy_at)
            xs = tl.load(x_at)
        else:
            exists = (token < num_tokens - start)[:, None]
            gs = tl.load(dy_at, mask=exists, other=0.0)
            xs = tl.load(x_at, mask=exists, other=0.0)
        total = tl.dot(tl.trans(gs), xs, total)
        dy_at += dy_step
        x_at += x_step
    return total


@triton.jit
def _tokens(x, stride, num_tokens, inner, TOKENS: tl.constexpr):
    """A program's tokens, and where they lie; past the last token the last one is read again, and nothing is stored."""
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    return token, x + tl.minimum(token, num_tokens - 1).to(tl.int64)[:, None] * stride + inner[None, :]


@triton.jit
def _store(y, width, token, num_tokens, place, total):
    at = y + token.to(tl.int64)[:, None] * width + place[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=(token < num_tokens)[:, None])
