"""The header of a sparse file: its version, its manifest, and an entry for each tensor.

The format is specified in docs/file-format.md.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.masks.encoding import MAX_EXPANSION, num_outside
from growprune.masks.layers import Weight
from growprune.masks.patterns import Pattern

FORMAT = "growprune"
BITS_ONLY, WITH_GAPS = "2", "3"
VERSIONS = (BITS_ONLY, WITH_GAPS)

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


class Digest(NamedTuple):
    """Checksums of a tensor's bytes. CRC-32 detects damage in less than half the time of SHA-256."""

    sha256: str
    crc32: int


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
    values: Digest
    """The checksums of the tensor, or of its live values."""
    weights: tuple[Weight, ...] = ()
    """The matrices of a prunable parameter, in order."""
    target: float | None = None
    nnz: int = 0
    mask: Digest | None = None
    """The checksums of the mask, for a prunable parameter."""
    gaps: Gaps | None = None
    """The gaps, if the mask is stored as gaps."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

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
        about: dict[str, Any] = {"shape": list(self.shape), "dtype": DTYPES[self.dtype], **self.values._asdict()}
        if self.mask is not None:
            about["matrices"] = [list(weight.rows or (0, self.shape[0])) for weight in self.weights]
            about["transposed"] = self.weights[0].transposed
            if len(self.weights[0].shape) < len(self.shape):
                about["stacked"] = True
            about |= {"target": self.target, "nnz": self.nnz}
            about |= {"mask_sha256": self.mask.sha256, "mask_crc32": self.mask.crc32}
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
    dtype, values = dtypes[about["dtype"]], Digest(about["sha256"], whole(about["crc32"]))
    if "matrices" not in about:
        return Entry(name, shape, dtype, values)
    weights, nnz = _parse_matrices(name, shape, about), whole(about["nnz"])
    mask = Digest(about["mask_sha256"], whole(about["mask_crc32"]))
    gaps = _parse_gaps(*about["gaps"]) if "gaps" in about else None
    entry = Entry(name, shape, dtype, values, weights, nnz=nnz, mask=mask, gaps=gaps)
    if not entry.num_outside <= nnz <= entry.numel:
        raise GrowpruneError(f"{name} has {nnz} live weights of {entry.numel}")
    if gaps is not None:
        _check_gaps(entry, gaps)
    return entry


def _parse_gaps(dtype: str, length: object) -> Gaps:
    return Gaps({text: dtype for dtype, text in GAP_DTYPES.items()}[dtype], whole(length))


def _check_gaps(entry: Entry, gaps: Gaps) -> None:
    """Raise if gaps belong to a dense tensor, or if a few of them would need a huge amount of memory."""
    if not entry.is_sparse:
        raise GrowpruneError(f"{entry.name} has gaps, but all of its weights are live")
    in_file = entry.nnz * entry.dtype.itemsize + gaps.length * gaps.dtype.itemsize
    if entry.num_bytes > MAX_EXPANSION * in_file:
        raise GrowpruneError(
            f"{entry.name} has {in_file} bytes in the file but {entry.num_bytes} when dense, more than "
            f"{MAX_EXPANSION} times as many"
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
    """Raise if blocks are so large that a few bytes of a mask would need a huge amount of memory."""
    if max(pattern.height, pattern.width) > MAX_BLOCK_SIDE:
        raise GrowpruneError(
            f"blocks in a file may be at most {MAX_BLOCK_SIDE} wide or high, got pattern {pattern.name}"
        )


def digest(tensor: Tensor) -> Digest:
    return Digest(sha256(bytes_of(tensor)), crc32(tensor))


def sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def crc32(tensor: Tensor) -> int:
    return zlib.crc32(bytes_of(tensor))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order, without a copy if possible."""
    data: memoryview = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return data


def write_metadata(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the strings of the header that identify the file."""
    for name, value in manifest.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise GrowpruneError(
                f"{name}={repr(value)[:60]} cannot be written to a file ({error}): create the SparseModel with plain "
                f"Python numbers and strings"
            ) from error
    text = json.dumps(manifest)
    version = {"format": FORMAT, "version": _version_of(manifest)}
    return {**version, "manifest": text, "manifest_sha256": sha256(text.encode())}


def read_metadata(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the manifest from the metadata of a known version. Raise if anything is invalid."""
    text = metadata["manifest"]
    if sha256(text.encode()) != metadata["manifest_sha256"]:
        raise GrowpruneError("its SHA-256 does not match")
    manifest = json.loads(text)
    if not isinstance(manifest, dict):
        raise GrowpruneError("it is not a JSON object")
    if (needed := _version_of(manifest)) != metadata["version"]:  # so that a changed version is noticed
        kind = "gap-encoded masks need" if needed == WITH_GAPS else "masks without gaps need"
        raise GrowpruneError(f"{kind} file version {needed}, this file says version {metadata['version']}")
    return manifest


def _version_of(manifest: Mapping[str, Any]) -> str:
    return WITH_GAPS if any("gaps" in about for about in manifest["tensors"].values()) else BITS_ONLY
