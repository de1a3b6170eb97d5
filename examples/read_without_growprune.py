"""Read a sparse file with numpy and safetensors alone: no torch, no growprune.

    python read_without_growprune.py model.safetensors              lists the tensors
    python read_without_growprune.py model.safetensors out.npz      writes them, dense, for numpy.load

docs/file-format.md specifies the format. numpy has no bfloat16: such tensors become float32.
"""

import json
import sys
import zlib
from pathlib import Path

import numpy as np
import safetensors

DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "C64": "<c8",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "U16": "<u2", "BOOL": "?",
}  # fmt: skip


def read(path):
    """Every tensor of a sparse file, dense, by name."""
    content = Path(path).read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    manifest = read_manifest(path, header.get("__metadata__", {}))
    stored = {name: to_array(tensor) for name, tensor in safetensors.deserialize(content)}
    dense = {}
    for name, about in manifest["tensors"].items():
        values = stored[name if name in stored else f"{name}.values"]
        if zlib.crc32(values.tobytes()) != about["crc32"]:
            raise ValueError(f"the values of {name} are damaged")
        values = widen(values, about["dtype"])
        mask = stored.get(f"{name}.gaps" if "gaps" in about else f"{name}.mask")
        dense[name] = values if name in stored else scatter(values, mask, name, about, manifest)
    return dense | {alias: dense[name] for alias, name in manifest["aliases"].items()}


def read_manifest(path, metadata):
    if metadata.get("format") != "growprune" or metadata.get("version") != "5":
        raise ValueError(f"{path} is not a growprune file of version 5")
    text = metadata["manifest"]
    if str(zlib.crc32(text.encode())) != metadata["manifest_crc32"]:
        raise ValueError(f"the manifest of {path} is damaged")
    return json.loads(text)


def to_array(tensor):
    return np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])


def widen(array, dtype):
    """A bfloat16 is the upper half of a float32."""
    return (array.astype("<u4") << 16).view("<f4") if dtype == "BF16" else array


def scatter(values, stored, name, about, manifest):
    """The dense tensor, from its live values and its mask."""
    if zlib.crc32(stored.tobytes()) != about["mask_crc32"]:
        raise ValueError(f"the mask of {name} is damaged")
    bits = read_gaps(stored, about) if "gaps" in about else np.unpackbits(stored, bitorder="little").astype(bool)
    mask = expand(bits, about, manifest["pattern"])
    if not mask.sum() == len(values) == about["nnz"]:
        raise ValueError(f"{name} has {len(values)} values, but {mask.sum()} alive")
    dense = np.zeros(about["shape"], values.dtype)
    dense[mask] = values
    return dense


def read_gaps(gaps, about):
    """The bits of the matrices, from the numbers of dead ones between live ones."""
    lives = gaps != np.iinfo(gaps.dtype).max  # the largest number: that many dead bits, then no live one
    bits = np.zeros(sum(stop - start for start, stop in about["matrices"]) * int(np.prod(about["shape"][1:])), bool)
    bits[np.cumsum(gaps.astype(np.int64) + lives)[lives] - 1] = True
    return bits


def expand(bits, about, pattern):
    """Which weights of a parameter live, as bools of its shape, from the bits of its matrices."""
    mask = np.ones(about["shape"], bool)
    for start, stop in about["matrices"]:
        matrix = mask[start] if about.get("stacked") else mask[start:stop]  # a view: writing to it fills the mask
        if "x" not in pattern:  # one bit a weight
            matrix[...] = bits[: matrix.size].reshape(matrix.shape)
            bits = bits[matrix.size :]
            continue
        height, width = map(int, pattern.split("x"))
        folded = fold(matrix, about["transposed"])  # (out, ..., in), also a view
        rows, columns = len(folded), folded.size // len(folded)
        down, across = -(-rows // height), -(-columns // width)
        blocks = bits[: down * across].reshape(down, across)
        bits = bits[down * across :]
        cells = blocks.repeat(height, axis=0)[:rows].repeat(width, axis=1)[:, :columns]
        folded[...] = cells.reshape(folded.shape)
    return mask


def fold(matrix, transposed):
    if matrix.ndim == 1:
        return matrix[:, None]
    outputs_first = matrix.swapaxes(0, 1) if transposed else matrix
    return np.moveaxis(outputs_first, 1, -1)


if __name__ == "__main__":
    tensors = read(sys.argv[1])
    if len(sys.argv) > 2:
        np.savez(sys.argv[2], **tensors)
    for tensor_name, values in tensors.items():
        print(f"{tensor_name}: {values.dtype} {list(values.shape)}, {np.count_nonzero(values)} non-zero")
