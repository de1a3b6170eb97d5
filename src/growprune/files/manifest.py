"""The header of a sparse file: its version, its manifest, and an entry for each tensor.

The format is specified in docs/file-format.md.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.masks.bits import MAX_EXPANSION, num_outside
from growprune.masks.layers import Weight
from growprune.masks.patterns import Pattern

FORMAT = "growprune"
VERSION = "5"

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

MAX_BLOCK_SIDE, MAX_DIMENSIONS = 1024, 64


class Gaps(NamedTuple):
    """The tensor that holds a mask as gaps."""

    dtype: torch.dtype
    length: int


@dataclass(frozen=True)
class Entry:
    """A tensor of the model, as the manifest describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    crc32: int
    """The checksum of the tensor, or of its live values."""
    weights: tuple[Weight, ...] = ()
    """The matrices of a prunable parameter, in order."""
    target: float | None = None
    nnz: int = 0
    mask_crc32: int | None = None
    """The checksum of the mask, for a prunable parameter."""
    gaps: Gaps | None = None
    """The gaps, if the mask is stored as gaps."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def num_value_bytes(self) -> int:
        """The bytes of the values in the file."""
        return (self.nnz if self.weights else self.numel) * self.dtype.itemsize

    @property
    def num_outside(self) -> int:
        """The number of elements that belong to no matrix and are always live."""
        return num_outside(self.shape, self.weights)

    @property
    def is_sparse(self) -> bool:
        return bool(self.weights) and self.nnz < self.numel

    @property
    def mask_name(self) -> str:
        """The name of the tensor that holds the mask."""
        return f"{self.name}.mask" if self.gaps is None else f"{self.name}.gaps"

    def to_dict(self) -> dict[str, Any]:
        about: dict[str, Any] = {"shape": list(self.shape), "dtype": DTYPES[self.dtype], "crc32": self.crc32}
        if self.mask_crc32 is not None:
            about["matrices"] = [list(weight.rows or (0, self.shape[0])) for weight in self.weights]
            about["transposed"] = self.weights[0].transposed
            if len(self.weights[0].shape) < len(self.shape):
                about["stacked"] = True
            about |= {"target": self.target, "nnz": self.nnz, "mask_crc32": self.mask_crc32}
            if self.gaps is not None:
                about["gaps"] = [GAP_DTYPES[self.gaps.dtype], self.gaps.length]
        return about


def parse_entry(name: str, about: Mapping[str, Any]) -> Entry:
    """Parse an entry of the manifest. Nothing in it is trusted."""
    dtypes = {text: dtype for dtype, text in DTYPES.items()}
    if len(about["shape"]) > MAX_DIMENSIONS:
        raise GrowpruneError(f"{name} has more than {MAX_DIMENSIONS} dimensions")
    shape = tuple(whole(length) for length in about["shape"])
    whole(math.prod(shape))
    dtype, crc = dtypes[about["dtype"]], whole(about["crc32"])
    if "matrices" not in about:
        return Entry(name, shape, dtype, crc)
    weights, nnz, gaps = _parse_matrices(name, shape, about), whole(about["nnz"]), None
    if (target := about["target"]) is not None and not (type(target) in (int, float) and 0 <= target <= 1):
        raise GrowpruneError(f"{name} has a target of {str(target)[:20]}")
    if "gaps" in about:
        kind, length = about["gaps"]
        gaps = Gaps({text: dtype for dtype, text in GAP_DTYPES.items()}[kind], whole(length))
    entry = Entry(name, shape, dtype, crc, weights, target, nnz, whole(about["mask_crc32"]), gaps)
    if not entry.num_outside <= nnz <= entry.numel:
        raise GrowpruneError(f"{name} has {nnz} live weights of {entry.numel}")
    if gaps is not None and not entry.is_sparse:
        raise GrowpruneError(f"{name} has gaps, but all of its weights are live")
    if gaps is not None:  # a few of them must not need a huge amount of memory
        in_file = entry.num_value_bytes + gaps.length * gaps.dtype.itemsize
        if entry.num_bytes > MAX_EXPANSION * in_file:
            raise GrowpruneError(
                f"{name} has {in_file} bytes in the file but {entry.num_bytes} when dense, more than {MAX_EXPANSION} "
                f"times as many"
            )
    return entry


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
    """Raise if blocks are so large that a few bytes of a mask would need a huge amount of memory."""
    if max(pattern.height, pattern.width) > MAX_BLOCK_SIDE:
        raise GrowpruneError(
            f"blocks in a file may be at most {MAX_BLOCK_SIDE} wide or high, got pattern {pattern.name}"
        )


def crc32(tensor: Tensor) -> int:
    return zlib.crc32(bytes_of(tensor))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order, without a copy if possible."""
    data: memoryview = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return data


def write_metadata(settings: Mapping[str, Any], entries: Iterable[Entry]) -> dict[str, str]:
    """Return the strings of the header that identify the file."""
    manifest = {**settings, "tensors": {entry.name: entry.to_dict() for entry in entries}}
    for name, value in manifest.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise GrowpruneError(
                f"{name}={repr(value)[:60]} cannot be written to a file ({error}): create the SparseModel with plain "
                f"Python numbers and strings"
            ) from error
    text = json.dumps(manifest)
    return {"format": FORMAT, "version": VERSION, "manifest": text, "manifest_crc32": str(zlib.crc32(text.encode()))}


def read_metadata(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the manifest from the metadata of a file of this version. Raise if anything is invalid."""
    text = metadata["manifest"]
    if str(zlib.crc32(text.encode())) != metadata["manifest_crc32"]:
        raise GrowpruneError("its CRC-32 does not match")
    manifest = json.loads(text)
    if not isinstance(manifest, dict):
        raise GrowpruneError("it is not a JSON object")
    return manifest
