# mypy: allow-untyped-calls
# torch.library has no types
"""The operations of compact storage: `expand` live values to a dense tensor, and `compress` it back; and `Layout`.

A sparse tensor of n elements, read flat and row-major, is three tensors:

    values   its live elements in order, 1-D
    bits     its mask, uint8, eight to a byte, least significant bit first, zero bits up to a whole block of 1024 bits
    offsets  int64, one for each block: how many bits are set in the blocks before it

With `group=g` a bit stands for g consecutive elements, which are live or dead together: 1x8 blocks cost an eighth of a
bit per weight. Offsets then count live groups. A block is always 1024 bits, so `offsets` cost 1/16 of a bit per bit.

`expand` and `compress` are PyTorch operators, so torch.compile does not break its graph at them. They have no
derivatives of their own; the layers that use them have. On CUDA they run in Triton, without synchronization. Elsewhere,
and on CUDA without Triton, they run in torch operations over a few hundred thousand weights at a time, so that
temporaries are smaller than the dense tensor.
"""

from __future__ import annotations

import copy
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.masks.bits import pack as pack_mask
from growprune.masks.bits import unpack as unpack_mask
from growprune.masks.patterns import CPU_CHUNK, CUDA_CHUNK

if TYPE_CHECKING:
    from growprune.storage.block_products import LiveBlocks

BLOCK = 1024
"""The bits that share an offset. The last block is padded with zeros, so loads never end inside a block."""

log = logging.getLogger(__name__)


def pack(mask: Tensor, *, group: int = 1) -> Tensor:
    """Pack a flat bool mask into bits. The elements of a group must agree; the first one is used."""
    return padded_copy(pack_mask(mask.reshape(-1, group)[:, 0]), to=BLOCK // 8)


def unpack(bits: Tensor, n: int, *, group: int = 1) -> Tensor:
    """Unpack bits into the flat bool mask of n elements: the inverse of `pack`."""
    num_groups = n // group
    lives = unpack_mask(bits[: -(-num_groups // 8)], (num_groups,))
    return lives if group == 1 else lives.unsqueeze(1).expand(-1, group).reshape(-1)


def block_offsets(bits: Tensor) -> tuple[Tensor, int]:
    """Return how many bits are set before each block, and in total."""
    if bits.device.type != "cpu":
        # in each pair of bits, how many are set; then in each four, then in all
        pairs = bits - ((bits >> 1) & 0x55)
        fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
        counts = ((fours + (fours >> 4)) & 0x0F).view(-1, BLOCK // 8).sum(1)
    else:
        words = np.bitwise_count(bits.numpy().view(np.uint64)).reshape(-1, BLOCK // 64)
        counts = torch.from_numpy(words.sum(1, dtype=np.int64))
    ends = counts.cumsum(0)
    offsets = torch.zeros_like(ends)
    offsets[1:] = ends[:-1]
    return offsets, int(ends[-1]) if ends.numel() else 0


def count_bits(bits: Tensor) -> int:
    """Count the bits that are set in bytes on the CPU."""
    octets = bits.numpy()
    end = octets.size // 8 * 8  # eight bytes at a time, and what is left
    parts = np.ascontiguousarray(octets[:end]).view(np.uint64), octets[end:]
    return sum(int(np.bitwise_count(part).sum(dtype=np.int64)) for part in parts)


def _expand(values: Tensor, bits: Tensor, offsets: Tensor, n: int, dtype: torch.dtype, group: int) -> Tensor:
    if triton := _triton_kernels(values.device.type):
        return triton.expand(values, bits, offsets, n, dtype, group)  # type: ignore[no-any-return]
    dense = torch.zeros(n, dtype=dtype, device=values.device)
    for span, positions, live in _live_spans(bits, n, group):
        _by_group(dense[span], group).index_copy_(0, positions, _by_group(values[live].to(dtype), group))
    return dense


def _fake_expand(values: Tensor, bits: Tensor, offsets: Tensor, n: int, dtype: torch.dtype, group: int) -> Tensor:
    if torch.compiler.is_exporting():
        _refuse_to_export("exported (torch.export, and ONNX by it)")
    return values.new_empty(n, dtype=dtype)


def _refuse_to_export(what: str) -> None:
    raise GrowpruneError(f"a model with storage='compact' cannot be {what}: call sparse.to_dense_() first")


def _compress(dense: Tensor, bits: Tensor, offsets: Tensor, nnz: int, dtype: torch.dtype, group: int) -> Tensor:
    if triton := _triton_kernels(dense.device.type):
        return triton.compress(dense, bits, offsets, nnz, dtype, group)  # type: ignore[no-any-return]
    values = torch.empty(nnz, dtype=dtype, device=dense.device)
    for span, positions, live in _live_spans(bits, dense.numel(), group):
        values[live] = _by_group(dense[span], group).index_select(0, positions).view(-1)
    return values


_library = torch.library.Library("growprune", "FRAGMENT")


def _register(schema: str, kernel: Callable[..., Tensor], fake: Callable[..., Tensor]) -> None:
    # not torch.library.custom_op: 12 microseconds a call to 4 here, and there are several calls a layer in each step
    name = _library.define(schema)
    # where a whole training step is compiled, torch.compile would trace the kernel as well
    _library.impl(name, torch._disable_dynamo(kernel), "CompositeExplicitAutograd")  # type: ignore[attr-defined]
    torch.library.register_fake(f"growprune::{name}", fake, lib=_library)


_register(
    "expand(Tensor values, Tensor bits, Tensor offsets, SymInt n, ScalarType dtype, SymInt group) -> Tensor",
    _expand,
    _fake_expand,
)
_register(
    "compress(Tensor dense, Tensor bits, Tensor offsets, SymInt nnz, ScalarType dtype, SymInt group) -> Tensor",
    _compress,
    lambda dense, bits, offsets, nnz, dtype, group: dense.new_empty(nnz, dtype=dtype),
)


def expand(values: Tensor, bits: Tensor, offsets: Tensor, n: int, dtype: torch.dtype, group: int = 1) -> Tensor:
    """Return the n elements as a dense tensor in the given dtype: `values` where live, exact zeros elsewhere.

    Here and in `compress`, arguments are not checked against each other, because that takes as long as a kernel. The
    dispatcher is bypassed if nothing listens to it.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined]  # torch.compile knows it by this name only
        _refuse_to_export("traced (torch.jit.trace, and ONNX or OpenVINO by it)")
    run = _expand if _is_direct(values) else torch.ops.growprune.expand
    return run(values, bits, offsets, n, dtype, group)


def compress(dense: Tensor, bits: Tensor, offsets: Tensor, nnz: int, dtype: torch.dtype, group: int = 1) -> Tensor:
    """Return the `nnz` live elements of a flat dense tensor, in order and in the given dtype.

    `nnz` is what `block_offsets` counted, times the group.
    """
    run = _compress if _is_direct(dense) else torch.ops.growprune.compress
    return run(dense, bits, offsets, nnz, dtype, group)


def _is_direct(operand: Tensor) -> bool:
    """True if nothing listens to the dispatcher: no mode and no transform."""
    is_usual = operand.is_cuda or (operand.is_cpu and type(operand) in (Tensor, torch.nn.Parameter))
    return is_usual and is_plain() and (operand.is_cuda or not torch._C._are_functorch_transforms_active())


def is_plain() -> bool:
    """True if operations are not traced, compiled or counted."""
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0


def padded_copy(tensor: Tensor, *, to: int = 1) -> Tensor:
    """Copy a flat tensor, padded with zeros to a multiple of `to` elements.

    The CPU uses numpy in one thread: torch would wake all threads for each tensor, and wait for the slowest.
    """
    size = -(-tensor.numel() // to) * to
    if not size:
        return torch.empty_like(tensor)  # torch cannot view nothing as bytes
    if tensor.device.type != "cpu":
        return torch.nn.functional.pad(tensor, (0, size - tensor.numel()), mode="constant").clone()
    octets = np.empty(size * tensor.element_size(), np.uint8)
    octets[: tensor.nbytes] = tensor.contiguous().view(torch.uint8).numpy()
    octets[tensor.nbytes :] = 0
    return torch.from_numpy(octets).view(tensor.dtype)


def scatter_live(dense: Tensor, mask: Tensor, values: Tensor, packed: Tensor) -> None:
    """Write live values, and exact zeros elsewhere, into a flat tensor, and its bits into a mask; on the CPU."""
    integers = f"i{dense.element_size()}"  # numpy does not know every dtype of torch
    to, live = (tensor.detach().view(torch.uint8).numpy().view(integers) for tensor in (dense, values.contiguous()))
    lives, bits = mask.numpy(), packed.numpy()
    filled = 1 << 20  # the elements that a thread fills at a time
    spans = [slice(start, start + filled) for start in range(0, dense.numel(), filled)]
    counts = [count_bits(packed[span.start // 8 : span.stop // 8]) for span in spans]

    def fill_span(span: slice, end: int, count: int) -> None:
        some = lives[span]
        some[:] = np.unpackbits(bits[span.start // 8 : span.stop // 8], count=some.size, bitorder="little")
        to[span] = 0
        to[span][np.flatnonzero(some)] = live[end - count : end]  # bools, which numpy searches faster than bytes

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(fill_span, spans, accumulate(counts), counts))


def can_zero_off(device: torch.device) -> bool:
    return _triton_kernels(device.type) is not None


def zero_off(tensor: Tensor, bits: Tensor) -> None:
    """Set a contiguous tensor to zero where its bits are zero, in place, without autograd, if `can_zero_off`."""
    triton = _triton_kernels("cuda")
    assert triton is not None
    triton.zero_off(tensor, bits)


@functools.cache
def _triton_kernels(device_type: str) -> ModuleType | None:
    """Return the Triton kernels if they can run. Cached for each kind of device, so that it logs once."""
    if device_type != "cuda":
        return None
    try:
        from growprune.storage import triton_kernels
    except ImportError:
        log.warning("Triton is not installed: compact storage uses torch operations, which are slower on CUDA")
        return None
    return triton_kernels


def _live_spans(bits: Tensor, n: int, group: int) -> Iterator[tuple[slice, Tensor, slice]]:
    """Yield spans of the dense tensor, which of their groups are live, and the spans of `values` that hold them."""
    total, taken = n // group, 0
    step = -(-(CUDA_CHUNK if bits.is_cuda else CPU_CHUNK) // BLOCK) * BLOCK  # bits are packed in whole blocks
    for start in range(0, total, step):
        stop = min(start + step, total)
        part = bits[start // 8 : -(-stop // 8)]
        if part.device.type == "cpu":
            # numpy searches a mask with at most a tenth set bit by bit, and any other twice as fast: so append set bits
            tail = np.full(-(-part.numel() // 8), 0xFF, dtype=np.uint8)
            bools = np.unpackbits(np.append(part.numpy(), tail), bitorder="little").view(np.bool_)
            positions = torch.from_numpy(np.flatnonzero(bools)[: -8 * tail.size])
        else:
            octets = part.to(torch.int64).mul_(0x0101010101010101)  # a byte, eight times
            octets &= 0x8040201008040201 - (1 << 64)  # bit i of the i-th
            positions = octets.view(torch.uint8).nonzero().view(-1)
        live = slice(taken, taken + positions.numel() * group)
        yield slice(start * group, stop * group), positions, live
        taken = live.stop


def _by_group(flat: Tensor, group: int) -> Tensor:
    return flat if group == 1 else flat.view(-1, group)


@dataclass(eq=False)
class Layout:
    """The positions of one parameter's live values."""

    shape: torch.Size
    bits: Tensor
    offsets: Tensor
    num_alive: int
    group: int
    """The number of consecutive elements that are live or dead together, and share a bit."""
    is_folded: bool
    """True if elements are ordered kernel position by kernel position, as in blocks of a convolution."""
    blocks: LiveBlocks | None = None
    """The positions of its live blocks, if the pattern has blocks that products support."""

    @classmethod
    def of(cls, mask: Tensor, group: int) -> Layout:
        is_folded = group > 1 and mask.dim() > 2
        flat = (mask.movedim(1, -1) if is_folded else mask).reshape(-1)
        bits = pack(flat, group=group)
        offsets, num_groups = block_offsets(bits)
        return cls(mask.shape, bits, offsets, num_groups * group, group, is_folded)

    @classmethod
    def of_packed(cls, packed: Tensor, shape: torch.Size, group: int, *, keep: bool = False) -> Layout | None:
        """Return the layout of a packed mask, without unpacking it; None if values must be reordered.

        Args:
            keep: keep the given mask without a copy, if possible.
        """
        is_folded = group > 1 and len(shape) > 2
        if (is_folded and shape[2:].numel() > 1) or (group > 1 and group % 8):
            return None
        if group > 1:
            octets = packed.cpu().numpy().reshape(-1, group // 8)
            if not ((octets == octets[:, :1]).all() and ((octets[:, 0] == 0) | (octets[:, 0] == 0xFF)).all()):
                return None
            packed = torch.from_numpy(np.packbits(octets[:, 0] == 0xFF, bitorder="little")).to(packed.device)
        is_padded = packed.numel() % (BLOCK // 8) == 0
        bits = packed if keep and is_padded else padded_copy(packed, to=BLOCK // 8)
        offsets, num_groups = block_offsets(bits)
        return cls(shape, bits, offsets, num_groups * group, group, is_folded)

    def __post_init__(self) -> None:
        self._numel = self.shape.numel()
        self.recorder: weakref.ref[Any] | None = None
        """The sparse parameter that may record dense gradients. A copy has none."""

    def to(self, device: torch.device) -> Layout:
        if self.bits.device != device:
            self.bits, self.offsets = self.bits.to(device), self.offsets.to(device)
            self.blocks = None if self.blocks is None else self.blocks.to(device)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        copied = replace(self, **{name: copy.deepcopy(getattr(self, name)) for name in ("bits", "offsets", "blocks")})
        memo[id(self)] = copied
        return copied

    def mask(self) -> Tensor:
        return self._unfold(unpack(self.bits, self.shape.numel(), group=self.group))

    def expand(self, values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the dense tensor of live values."""
        self.to(values.device)
        return self._unfold(expand(values, self.bits, self.offsets, self._numel, dtype or values.dtype, self.group))

    def compress(self, dense: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the live values of a dense tensor."""
        self.to(dense.device)
        flat = (dense.movedim(1, -1) if self.is_folded else dense).reshape(-1)
        return compress(flat, self.bits, self.offsets, self.num_alive, dtype or dense.dtype, self.group)

    def _unfold(self, flat: Tensor) -> Tensor:
        if not self.is_folded:
            return flat.view(self.shape)
        folded = (self.shape[0], *self.shape[2:], self.shape[1])
        # of a 1x1 convolution, contiguous() would keep the strides of channels_last, with which torch rounds otherwise
        return flat.view(folded).movedim(-1, 1).reshape(-1).view(self.shape)
