# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# Triton has no types, and what a kernel takes is none of Python's
"""Radix select over many tensors in Triton: four passes that count digits, one that counts ties, one that writes.

All tensors of all pools go in one launch each: a program takes a chunk of one tensor, which it finds in a table of
addresses. The key of a weight is its magnitude's bits; dead weights are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1 << 14
"""Weights a program takes."""
BLOCK = 2048
"""Weights it takes at a time."""
DIGITS = ((23, 8), (15, 8), (7, 8), (0, 7))
"""Where each digit of a 31-bit key begins, and how many bits it has. The first is a float's exponent."""
BINS = 256
COLUMNS = 6
"""Of the table: the addresses of values, mask and new mask; how many weights; the pool; the place of its tensor."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def keep_largest(
    values: Sequence[Tensor], masks: Sequence[Tensor], pools: Sequence[int], kept: Sequence[int]
) -> list[Tensor] | None:
    device, dtype = values[0].device, TYPES[values[0].dtype]
    chosen = [torch.empty(v.shape, dtype=torch.bool, device=device) for v in values]
    rows = _rows(values, masks, chosen, pools)
    table = torch.from_numpy(rows).to(device, non_blocking=True)
    state = torch.tensor([[0, k] for k in kept], dtype=torch.int64).to(device, non_blocking=True)
    counts = torch.zeros(len(DIGITS), len(kept), BINS, dtype=torch.int64, device=device)
    grid = (len(rows),)
    for (shift, width), some in zip(DIGITS, counts, strict=True):
        _count_kernel[grid](table, state, some, shift, width, dtype, CHUNK, BLOCK, BINS, COLUMNS)
        _pick_kernel[(len(kept),)](some, state, width, BINS)
    ties = torch.empty(len(rows), dtype=torch.int64, device=device)
    _tie_kernel[grid](table, state, ties, dtype, CHUNK, BLOCK, COLUMNS)
    _write_kernel[grid](table, state, _ties_before(ties, rows), dtype, CHUNK, BLOCK, COLUMNS)
    return None if bool(counts[0, :, BINS - 1].any()) else chosen


def _rows(
    values: Sequence[Tensor], masks: Sequence[Tensor], chosen: Sequence[Tensor], pools: Sequence[int]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What each program takes: pool by pool, and in each in flat order."""
    rows = []
    for i in sorted(range(len(values)), key=lambda i: pools[i]):
        n, size = values[i].numel(), values[i].element_size()
        starts = np.arange(0, n, CHUNK, dtype=np.int64)
        columns = (
            values[i].data_ptr() + starts * size,
            masks[i].data_ptr() + starts,
            chosen[i].data_ptr() + starts,
            np.minimum(CHUNK, n - starts),
            np.full_like(starts, pools[i]),
            np.full_like(starts, i),
        )
        rows.append(np.stack(columns, 1))
    return np.concatenate(rows)


def _ties_before(ties: Tensor, rows: np.ndarray[Any, np.dtype[np.int64]]) -> Tensor:
    """How many ties of the same pool lie in the chunks before each."""
    before = ties.cumsum(0) - ties
    _, firsts, place = np.unique(rows[:, 4], return_index=True, return_inverse=True)
    return before - before[torch.from_numpy(firsts[place]).to(ties.device, non_blocking=True)]


@triton.jit
def _chunk(table, DTYPE: tl.constexpr, COLUMNS: tl.constexpr):
    """This program's weights, their mask, how many there are, and their pool."""
    row = table + tl.program_id(0) * COLUMNS
    values = tl.load(row).to(tl.pointer_type(DTYPE))
    mask = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
    return values, mask, tl.load(row + 3).to(tl.int32), tl.load(row + 4)


@triton.jit
def _keys(values, mask, place, n):
    """Magnitudes as integers, and which weights live."""
    exists = place < n
    x = tl.load(values + place, mask=exists, other=0).to(tl.float32)
    alive = tl.load(mask + place, mask=exists, other=0) != 0
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, alive


@triton.jit
def _count_kernel(
    table,
    state,
    counts,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """How many keys that begin with the prefix have each next digit."""
    values, mask, n, pool = _chunk(table, DTYPE, COLUMNS)
    prefix = tl.load(state + pool * 2)
    found = tl.zeros([BINS], tl.int32)
    for start in range(0, CHUNK, BLOCK):
        key, alive = _keys(values, mask, start + tl.arange(0, BLOCK), n)
        is_counted = alive & ((key.to(tl.int64) >> (SHIFT + WIDTH)) == prefix)
        digit = (key >> SHIFT) & ((1 << WIDTH) - 1)
        found += tl.histogram(digit, BINS, mask=is_counted)
    bins = tl.arange(0, BINS)
    tl.atomic_add(counts + pool * BINS + bins, found.to(tl.int64), mask=found > 0)


@triton.jit
def _pick_kernel(counts, state, WIDTH: tl.constexpr, BINS: tl.constexpr):
    """Continue with the digit of the last key that is kept."""
    pool = tl.program_id(0)
    bins = tl.arange(0, BINS)
    count = tl.load(counts + pool * BINS + (BINS - 1 - bins))  # the largest digit first
    prefix, left = tl.load(state + pool * 2), tl.load(state + pool * 2 + 1)
    above = tl.cumsum(count, 0) - count
    place = tl.sum((above + count < left).to(tl.int32), 0)
    taken = tl.sum(tl.where(bins == place, above, 0), 0)
    tl.store(state + pool * 2, (prefix << WIDTH) | (BINS - 1 - place))
    tl.store(state + pool * 2 + 1, left - taken)


@triton.jit
def _tie_kernel(
    table, state, ties, DTYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):
    values, mask, n, pool = _chunk(table, DTYPE, COLUMNS)
    threshold = tl.load(state + pool * 2)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, CHUNK, BLOCK):
        key, alive = _keys(values, mask, start + tl.arange(0, BLOCK), n)
        found += (alive & (key == threshold)).to(tl.int32)
    tl.store(ties + tl.program_id(0), tl.sum(found, 0).to(tl.int64))


@triton.jit
def _write_kernel(
    table, state, before, DTYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):
    values, mask, n, pool = _chunk(table, DTYPE, COLUMNS)
    chosen = tl.load(table + tl.program_id(0) * COLUMNS + 2).to(tl.pointer_type(tl.uint8))
    threshold, left = tl.load(state + pool * 2), tl.load(state + pool * 2 + 1)
    rank = tl.load(before + tl.program_id(0))
    for start in range(0, CHUNK, BLOCK):
        place = start + tl.arange(0, BLOCK)
        key, alive = _keys(values, mask, place, n)
        is_tie = alive & (key == threshold)
        ties = is_tie.to(tl.int32)
        is_kept = (alive & (key > threshold)) | (is_tie & (rank + tl.cumsum(ties, 0) - ties < left))
        tl.store(chosen + place, is_kept.to(tl.uint8), mask=place < n)
        rank += tl.sum(ties, 0)
