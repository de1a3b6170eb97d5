"""What a sparse file knows of one tensor."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.masks.layers import Weight
from growprune.masks.patterns import Pattern

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
GAP_DTYPES = {torch.uint8: "U8", torch.uint16: "U16"}
"""What gaps may be, the smaller first."""

MAX_BLOCK_SIDE, MAX_DIMENSIONS = 1024, 64
MAX_EXPANSION = 1000
"""How many times its own size a file may become when it is read without a model that says how large it should be.

And how many times its size in the file a tensor may take if its mask is stored as gaps, a few of which reach far.
"""


@dataclass(frozen=True)
class Gaps:
    """What the tensor is that holds a mask as gaps."""

    dtype: torch.dtype
    length: int


@dataclass(frozen=True)
class Entry:
    """A tensor of the model, as the manifest knows it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    weights: tuple[Weight, ...] = ()
    """The matrices of a prunable parameter, in order."""
    target: float | None = None
    nnz: int = 0
    sha256: str | None = None
    """Of the bytes of the tensor, or of its live values; None in a file of version 1, which has no such digest."""
    mask_sha256: str = ""
    gaps: Gaps | None = None
    """How its mask is stored, if not as bits."""
    crc32: int | None = None
    """Of the bytes that `sha256` is of; None in files from before it was written."""
    mask_crc32: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def num_outside(self) -> int:
        """How many elements lie in no matrix, and so always live."""
        return self.numel - sum(weight.numel for weight in self.weights)

    @property
    def is_sparse(self) -> bool:
        return bool(self.weights) and self.nnz < self.numel

    def to_dict(self) -> dict[str, Any]:
        about: dict[str, Any] = {"shape": list(self.shape), "dtype": DTYPES[self.dtype], "sha256": self.sha256}
        about |= {} if self.crc32 is None else {"crc32": self.crc32}
        if self.weights:
            about["matrices"] = [list(weight.rows or (0, self.shape[0])) for weight in self.weights]
            about["transposed"] = self.weights[0].transposed
            if len(self.weights[0].shape) < len(self.shape):
                about["stacked"] = True
            about |= {"target": self.target, "nnz": self.nnz, "mask_sha256": self.mask_sha256}
            about |= {} if self.mask_crc32 is None else {"mask_crc32": self.mask_crc32}
            if self.gaps is not None:
                about["gaps"] = [GAP_DTYPES[self.gaps.dtype], self.gaps.length]
        return about


def parse_entry(name: str, about: Mapping[str, Any]) -> Entry:
    """An entry from the manifest. Nothing in it is trusted."""
    dtypes = {text: dtype for dtype, text in DTYPES.items()}
    if len(about["shape"]) > MAX_DIMENSIONS:
        raise GrowpruneError(f"{name} has more than {MAX_DIMENSIONS} dimensions")
    shape = tuple(whole(length) for length in about["shape"])
    whole(math.prod(shape))
    dtype, sha256 = dtypes[about["dtype"]], about["sha256"]
    crc32, mask_crc32 = (whole(about[key]) if key in about else None for key in ("crc32", "mask_crc32"))
    if "matrices" not in about:
        return Entry(name, shape, dtype, sha256=sha256, crc32=crc32)
    weights, nnz = _parse_matrices(name, shape, about), whole(about["nnz"])
    gaps = _parse_gaps(*about["gaps"]) if "gaps" in about else None
    checks = {"sha256": sha256, "mask_sha256": about["mask_sha256"], "crc32": crc32, "mask_crc32": mask_crc32}
    entry = Entry(name, shape, dtype, weights, nnz=nnz, gaps=gaps, **checks)
    if not entry.num_outside <= nnz <= entry.numel:
        raise GrowpruneError(f"{name} has {nnz} alive of {entry.numel}")
    if gaps is not None:
        _check_gaps(entry, gaps)
    return entry


def _parse_gaps(dtype: str, length: object) -> Gaps:
    return Gaps({text: dtype for dtype, text in GAP_DTYPES.items()}[dtype], whole(length))


def _check_gaps(entry: Entry, gaps: Gaps) -> None:
    """Refuse a few gaps that could ask for any amount of memory."""
    in_file = entry.nnz * entry.dtype.itemsize + gaps.length * gaps.dtype.itemsize
    if not entry.is_sparse or entry.num_bytes > MAX_EXPANSION * in_file:
        raise GrowpruneError(
            f"{entry.name} takes {in_file} bytes and would take {entry.num_bytes}, over {MAX_EXPANSION} times as many"
        )


def _parse_matrices(name: str, shape: tuple[int, ...], about: Mapping[str, Any]) -> tuple[Weight, ...]:
    weights: list[Weight] = []
    end = 0
    stacked, transposed = about.get("stacked") is True, about["transposed"] is True
    for start, stop in about["matrices"]:
        if (
            not end <= whole(start) < whole(stop) <= shape[0]
            or len(shape) < 1 + transposed + stacked
            or (stacked and stop - start > 1)
        ):
            raise GrowpruneError(f"the matrices of {name} do not fit its shape")
        rows = None if (start, stop) == (0, shape[0]) and not stacked else (start, stop)
        weights.append(Weight(name, name, shape[1:] if stacked else (stop - start, *shape[1:]), rows, transposed))
        end = stop
    return tuple(weights)


def whole(number: object) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 63:
        raise GrowpruneError(f"{str(number)[:20]} is not a size")
    return number


def check_blocks(pattern: Pattern) -> None:
    """Refuse blocks so large that a few bytes of a mask could ask for any amount of memory."""
    if max(pattern.height, pattern.width) > MAX_BLOCK_SIDE:
        raise GrowpruneError(f"pattern is {pattern.name}, but blocks in a file have sides of at most {MAX_BLOCK_SIDE}")


def digest(tensor: Tensor) -> str:
    """The SHA-256 of a tensor's bytes, in hexadecimal."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def crc32(tensor: Tensor) -> int:
    """The CRC-32 of a tensor's bytes: it tells damage as SHA-256 does, and takes less than half the time."""
    return zlib.crc32(bytes_of(tensor))


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order: its own memory, where that is possible."""
    data: memoryview = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return data
