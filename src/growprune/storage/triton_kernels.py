"""`expand` and `compress` on CUDA, one pass over memory each. Imported only where there is Triton and a GPU.

A program takes a few bytes of the mask. Where a live element lies in `values` is the offset of the block plus the
number of set bits before it in the block. A byte is spread to the eight nibbles of an integer, one for each bit; their
product with 0x11111111 holds the running counts of all eight, so that a byte costs one multiplication, and the program
one prefix sum over its bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 4
ELEMENTS = 1024
"""How many elements a program handles."""
MAX_WIDTH = 128
"""How many elements of one group a program handles."""


def expand(values: Tensor, bits: Tensor, offsets: Tensor, n: int, dtype: torch.dtype, group: int) -> Tensor:
    dense = torch.empty(n, dtype=dtype, device=values.device)
    _launch(_expand_kernel, values.contiguous(), bits, offsets, dense, group)
    return dense


def compress(values: Tensor, dense: Tensor, bits: Tensor, offsets: Tensor, group: int, *, add: bool) -> None:
    _launch(_compress_kernel, values, bits, offsets, dense.contiguous(), group, ADD=add)


def _launch(kernel, values, bits, offsets, dense, group, elements=ELEMENTS, num_warps=NUM_WARPS, **flags):
    width = min(triton.next_power_of_2(group), MAX_WIDTH)
    num_bytes = max(elements // width // 8, 1)
    grid = (triton.cdiv(bits.numel(), num_bytes), triton.cdiv(group, width))
    sizes = {"GROUP": group, "WIDTH": width, "BYTES": num_bytes, "num_warps": num_warps}
    with torch.cuda.device(values.device):
        kernel[grid](values, bits, offsets, dense, bits.numel(), dense.numel(), **sizes, **flags)


@triton.jit
def _expand_kernel(
    values, bits, offsets, dense, num_bytes, n, GROUP: tl.constexpr, WIDTH: tl.constexpr, BYTES: tl.constexpr
):
    octets, offset = _load_mask(bits, offsets, num_bytes, BYTES)
    first, place, exist = _places(n, GROUP, WIDTH, BYTES)
    begin, rank, lives = _ranks(octets, offset, GROUP, WIDTH)
    x = tl.load(values + begin + rank, mask=lives, other=0)
    tl.store(dense + first + place, _cast(x, dense.dtype.element_ty), mask=exist)


@triton.jit
def _compress_kernel(
    values,
    bits,
    offsets,
    dense,
    num_bytes,
    n,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,
    ADD: tl.constexpr,
):
    octets, offset = _load_mask(bits, offsets, num_bytes, BYTES)
    first, place, exist = _places(n, GROUP, WIDTH, BYTES)
    x = tl.load(dense + first + place, mask=exist, other=0)  # early: no load moves across the prefix sum's barrier
    begin, rank, lives = _ranks(octets, offset, GROUP, WIDTH)
    x = _cast(x, values.dtype.element_ty)
    if ADD:
        x += tl.load(values + begin + rank, mask=lives, other=0)
    tl.store(values + begin + rank, x, mask=lives)


@triton.jit
def _load_mask(bits, offsets, num_bytes, BYTES: tl.constexpr):
    """This program's bytes of the mask, and how many bits of the tensor are set before them."""
    first = tl.program_id(0).to(tl.int64) * BYTES
    block = first // 128
    offset = tl.load(offsets + block)
    byte = tl.arange(0, BYTES)
    octets = tl.load(bits + first + byte, mask=byte < num_bytes - first, other=0)
    if BYTES < 128:  # not the first of its block
        byte = tl.arange(0, 128)
        earlier = tl.load(bits + block * 128 + byte, mask=byte < first - block * 128, other=0)
        offset += tl.sum((_spread(earlier) * 0x11111111 >> 28).to(tl.int32), 0)
    return octets, offset


@triton.jit
def _places(n, GROUP: tl.constexpr, WIDTH: tl.constexpr, BYTES: tl.constexpr):
    """Where in the dense tensor this program's elements lie: the first, each from there, and which exist."""
    first = tl.program_id(0).to(tl.int64) * BYTES * 8 * GROUP
    bit = tl.arange(0, BYTES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    element = _elements(GROUP, WIDTH)
    place = bit[:, :, None] * GROUP + element
    exist = place < n - first
    if GROUP % WIDTH != 0:
        exist &= element < GROUP
    return first, place, exist


@triton.jit
def _ranks(octets, offset, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """Where in `values` this program's elements lie: where each byte's begin, each from there, and which live."""
    nibbles = _spread(octets)
    counts = nibbles * 0x11111111
    count = (counts >> 28).to(tl.int32)
    begin = (offset + (tl.cumsum(count, 0) - count)) * GROUP
    shift = tl.arange(0, 8).to(tl.uint32)[None, :] * 4
    before = (((counts - nibbles)[:, None] >> shift) & 15).to(tl.int32)
    lives = (((nibbles[:, None] >> shift) & 1) != 0)[:, :, None]
    element = _elements(GROUP, WIDTH)
    if GROUP % WIDTH != 0:
        lives &= element < GROUP
    return begin[:, None, None], before[:, :, None] * GROUP + element, lives


@triton.jit
def _elements(GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """Which elements of each group are this program's."""
    element = tl.arange(0, WIDTH)[None, None, :]
    if GROUP > WIDTH:
        element += tl.program_id(1) * WIDTH
    return element


@triton.jit
def _spread(octets):
    """Bit i of a byte to bit 4 i of an integer."""
    nibbles = octets.to(tl.uint32)
    nibbles = (nibbles | (nibbles << 12)) & 0x000F000F
    nibbles = (nibbles | (nibbles << 6)) & 0x03030303
    return (nibbles | (nibbles << 3)) & 0x11111111


@triton.jit
def _cast(x, dtype: tl.constexpr):
    """As torch casts: float64 reaches the short types by way of float32."""
    if x.dtype == tl.float64 and dtype != tl.float64:
        x = x.to(tl.float32)
    return x.to(dtype)
