# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# mypy: disable-error-code=assignment
# Triton has no types, and arguments of kernels have none in Python
"""Triton kernels for products with few columns. Sums are in float32, in a fixed order, without atomics.

`_lanes_kernel`: a program takes a few rows, a thread one unit at a time. All tensors are (threads, rows) with one
element per thread, or have one more dimension that lies within a thread. (By default, Triton gives neighbouring threads
neighbours of the first dimension.) So only the final sum is exchanged between threads, and all loads of a unit are 8 or
16 bytes. Loads are written before their uses, or each would wait for the one before. The assembler may move them down
again to save registers, for more threads; a barrier prevents it (PINNED). x is read through the first-level cache and
stays there: weights are marked to be evicted first. For batches, x is (columns, batch), so that one load brings up to
eight inputs. If the cache cannot hold all samples or columns, all programs of one part run before those of the next.

With few rows, the columns are split among programs; `_sum_kernel` adds up their sums, always in the same order.
Triton does not specialise on sizes (`do_not_specialize`), so that one kernel serves all layers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "num_columns", "batch", "split_units"])
def _lanes_kernel(
    x,
    offsets,
    bases,
    values,
    unit_starts,
    slab_starts,
    order,
    out,
    num_rows,
    num_columns,
    batch,
    split_units,
    BATCH: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    PINNED: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    first = tl.load(unit_starts + row, mask=exists, other=0)
    slab = tl.load(slab_starts + row, mask=exists, other=0)
    count = tl.load(unit_starts + row + 1, mask=exists, other=0) - first
    place = tl.load(order + row, mask=exists, other=0)  # where a row's sum goes
    begin = tl.program_id(1) * split_units
    count = tl.minimum(count, begin + split_units)
    x += tl.program_id(2) * num_columns * BATCH
    sums = tl.zeros([WIDTH, ROWS] if BATCH == 1 else [WIDTH, ROWS, BATCH], tl.float32)
    for unit in range(begin, tl.max(count, 0), WIDTH * STEPS):
        loaded = ()  # first columns, offsets and values of the next units of each thread
        for step in tl.static_range(STEPS):
            mine = unit + step * WIDTH + tl.arange(0, WIDTH)[:, None]
            at, is_live = first[None, :] + mine, mine < count[None, :]
            base = _pair(bases, tl.where(is_live, slab[None, :] + mine // LANES, 0), is_live, 2, 0)
            word = tl.load(offsets + at, mask=is_live, other=0, eviction_policy="evict_first")
            loaded = loaded + ((base, word, _weights(values, at, is_live)),)
        if PINNED:
            tl.debug_barrier()  # loads do not move past it, so all of them are on their way before the first is used
        for step in tl.static_range(STEPS):
            sums = _add_products(sums, x, loaded[step], values.dtype.element_ty, BATCH)
    out += tl.program_id(1).to(tl.int64) * batch * num_rows + place
    total = tl.sum(sums, 0).to(out.dtype.element_ty)
    if BATCH == 1:
        tl.store(out, total, mask=exists)
    else:
        sample = tl.program_id(2) * BATCH + tl.arange(0, BATCH)[None, :]
        tl.store(out[:, None] + sample * num_rows, total, mask=exists[:, None] & (sample < batch))


@triton.jit
def _add_products(sums, x, unit, dtype: tl.constexpr, BATCH: tl.constexpr):
    """Add the products of a unit's eight values with their inputs, which are all loaded before the first is used."""
    base, word, weights = unit
    first = base[0] + (word & 0x00FF00FF00FF00FF)  # four columns at once: no sum reaches 65536
    second = base[1] + ((word >> 8) & 0x00FF00FF00FF00FF)
    columns = (first, second)
    inputs = ()
    for run in tl.static_range(8):
        column = (columns[run // 4] >> (run % 4 * 16)).to(tl.int32) & 0xFFFF
        at = column if BATCH == 1 else column[:, :, None] * BATCH + tl.arange(0, BATCH)[None, None, :]
        inputs = inputs + (tl.load(x + at, eviction_policy="evict_last"),)
    for run in tl.static_range(8):
        weight = _weight(weights, run, dtype)
        sums += (weight if BATCH == 1 else weight[:, :, None]) * inputs[run].to(tl.float32)
    return sums


@triton.jit
def _pair(words, place, is_live, STRIDE: tl.constexpr, FIRST: tl.constexpr):
    """Load two neighbouring 64-bit words at once."""
    at = place.to(tl.int64)[:, :, None] * STRIDE + FIRST + tl.arange(0, 2)[None, None, :]
    return tl.split(tl.load(words + at, mask=is_live[:, :, None], other=0, eviction_policy="evict_first"))


@triton.jit
def _weights(values, place, is_live):
    """Load the eight values of a unit as two or four 64-bit words."""
    words = values.to(tl.pointer_type(tl.int64))
    if values.dtype.element_ty == tl.float32:
        loaded = _pair(words, place, is_live, 4, 0) + _pair(words, place, is_live, 4, 2)
    else:
        loaded = _pair(words, place, is_live, 2, 0)
    return loaded


@triton.jit
def _weight(words, RUN: tl.constexpr, dtype: tl.constexpr):
    """Return one value of a unit as float32."""
    if dtype == tl.float32:
        weight = (words[RUN // 2] >> (RUN % 2 * 32)).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        half = (words[RUN // 4] >> (RUN % 4 * 16)).to(tl.int32)
        if dtype == tl.bfloat16:
            weight = (half << 16).to(tl.float32, bitcast=True)
        else:
            weight = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return weight


@triton.jit(do_not_specialize=["batch"])
def _interleave_kernel(x, out, batch, num_columns, BATCH: tl.constexpr, BLOCK: tl.constexpr):
    """Transpose x to (columns, BATCH) for each BATCH samples, padded with zeros.

    Then one load reads all inputs of a column.
    """
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    within = tl.arange(0, BATCH)[None, :]
    sample = tl.program_id(1) * BATCH + within
    exists = column < num_columns
    inputs = tl.load(x + sample * num_columns + column, mask=exists & (sample < batch), other=0)
    tl.store(out + (tl.program_id(1) * num_columns + column) * BATCH + within, inputs, mask=exists)


@triton.jit(do_not_specialize=["n"])
def _sum_kernel(parts, out, n, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the partial sums of all programs, in order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = at < n
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(NUM_PARTS):
        total += tl.load(parts + part * n + at, mask=exists, other=0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=exists)
