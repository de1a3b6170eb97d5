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
from growprune.files.quantized import QUANTIZABLE, scale_shape
from growprune.masks.encoding import MAX_EXPANSION, num_outside
from growprune.masks.layers import Weight
from growprune.masks.patterns import Pattern

FORMAT = "growprune"
BITS_ONLY, WITH_GAPS, WITH_INT8 = "2", "3", "4"
VERSIONS = {BITS_ONLY: "masks without gaps", WITH_GAPS: "gap-encoded masks", WITH_INT8: "int8 values"}
"""What each version is for."""

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
    scales: Digest | None = None
    """The checksums of the scales, if the values are int8."""
    error: float = 0.0
    """The error of int8 values, relative to the norm of the values."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the values in the file."""
        return self.dtype if self.scales is None else torch.int8

    @property
    def scale_shape(self) -> tuple[int, ...]:
        return scale_shape(self.shape, transposed=self.weights[0].transposed, stacked=self.is_stacked)

    @property
    def num_value_bytes(self) -> int:
        """The bytes of values and scales in the file."""
        alive = self.nnz if self.weights else self.numel
        return alive * self.stored_dtype.itemsize + (0 if self.scales is None else 4 * math.prod(self.scale_shape))

    @property
    def is_stacked(self) -> bool:
        return bool(self.weights) and len(self.weights[0].shape) < len(self.shape)

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
            if self.is_stacked:
                about["stacked"] = True
            about |= {"target": self.target, "nnz": self.nnz}
            about |= {"mask_sha256": self.mask.sha256, "mask_crc32": self.mask.crc32}
            if self.gaps is not None:
                about["gaps"] = [GAP_DTYPES[self.gaps.dtype], self.gaps.length]
        if self.scales is not None:
            about |= {"scales_sha256": self.scales.sha256, "scales_crc32": self.scales.crc32, "error": self.error}
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
    scales, error = _parse_scales(name, dtype, about)
    entry = Entry(name, shape, dtype, values, weights, nnz=nnz, mask=mask, gaps=gaps, scales=scales, error=error)
    if not entry.num_outside <= nnz <= entry.numel:
        raise GrowpruneError(f"{name} has {nnz} live weights of {entry.numel}")
    if gaps is not None:
        _check_gaps(entry, gaps)
    return entry


def _parse_gaps(dtype: str, length: object) -> Gaps:
    return Gaps({text: dtype for dtype, text in GAP_DTYPES.items()}[dtype], whole(length))


def _parse_scales(name: str, dtype: torch.dtype, about: Mapping[str, Any]) -> tuple[Digest | None, float]:
    if "scales_sha256" not in about:
        return None, 0.0
    error = about["error"]
    if dtype not in QUANTIZABLE or not about["matrices"]:
        raise GrowpruneError(f"{name} has int8 values for {dtype}")
    if not isinstance(error, float) or not 0 <= error < math.inf:
        raise GrowpruneError(f"{name} has an error of {str(error)[:20]}")
    return Digest(about["scales_sha256"], whole(about["scales_crc32"])), error


def _check_gaps(entry: Entry, gaps: Gaps) -> None:
    """Raise if gaps belong to a dense tensor, or if a few of them would need a huge amount of memory."""
    if not entry.is_sparse:
        raise GrowpruneError(f"{entry.name} has gaps, but all of its weights are live")
    in_file = entry.num_value_bytes + gaps.length * gaps.dtype.itemsize
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
        raise GrowpruneError(
            f"{VERSIONS[needed]} need file version {needed}, this file says version {metadata['version']}"
        )
    return manifest


def _version_of(manifest: Mapping[str, Any]) -> str:
    keys = {key for about in manifest["tensors"].values() for key in about}
    return WITH_INT8 if "scales_sha256" in keys else WITH_GAPS if "gaps" in keys else BITS_ONLY
