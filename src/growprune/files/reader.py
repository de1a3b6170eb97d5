"""Read tensors and masks from a sparse file, in which nothing is trusted."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.files.manifest import (
    DTYPES,
    FORMAT,
    GAP_DTYPES,
    VERSIONS,
    Digest,
    Entry,
    bytes_of,
    check_blocks,
    crc32,
    parse_entry,
    read_metadata,
    sha256,
    whole,
)
from growprune.files.quantized import dequantize
from growprune.masks.bits import pack, unpack
from growprune.masks.encoding import from_gaps, num_bits, num_mask_bytes, row_major
from growprune.masks.layers import is_compact, prunable_weights, tensors_of
from growprune.masks.patterns import parse_pattern
from growprune.sparse.model import SparseModel
from growprune.storage.kernels import count_bits, padded_copy, scatter_live

T = TypeVar("T")

SETTINGS: dict[str, type | tuple[type, ...]] = {
    "sparsity": (int, float),
    "allocation": str,
    "pattern": str,
    "keep_dense": list,
    "include": list,
    "seed": int,
}
"""The arguments of SparseModel, and their types in JSON."""

MAX_NAME = 1000
"""The longest name or glob in keep_dense or include. Matching a longer one could take hours."""

LARGE = 1 << 18
"""The least bytes, dense, for which a tensor is read in a thread."""

MAX_MESSAGE = 400
"""The most characters of an error that may come from an untrusted file."""


class SparseFile:
    """An open sparse file, whose header has been checked against its tensors."""

    def __init__(self, path: Path, handle: Any, *, thorough: bool = False) -> None:
        self.path, self._thorough = path, thorough
        self.num_bytes = path.stat().st_size
        self._handle = handle
        metadata = handle.metadata() or {}
        self.version = self._check_version(metadata)
        try:
            self._read_manifest(read_metadata(metadata))
        except GrowpruneError as error:
            self.refuse(f"has an invalid manifest ({error})")
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            self.refuse(f"has an invalid manifest ({type(error).__name__}: {error})")
        self._check_header()

    @property
    def prunable(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.weights]

    def mask(self, entry: Entry) -> Tensor:
        """Return the mask as bools, after checking it against the manifest and the number of values."""
        if not entry.is_sparse:
            return torch.ones(entry.shape, dtype=torch.bool)
        return unpack(self.bits(entry), entry.shape)

    def bits(self, entry: Entry) -> Tensor:
        """Return the mask as bits in row-major order, eight to a byte, the first in the lowest bit.

        It is checked as in `mask`. If the file stores exactly these bits, it is a view of the file.
        """
        if not entry.is_sparse:
            return pack(torch.ones(entry.numel, dtype=torch.bool))
        bits = row_major(self._stored_bits(entry), entry.shape, entry.weights, self.pattern)
        if (alive := count_bits(bits)) != entry.nnz:
            self.refuse(f"has a mask of {entry.name} with {alive} live weights, but {entry.nnz} values")
        return bits

    def _stored_bits(self, entry: Entry) -> Tensor:
        """Return the bits of the matrices, one per weight or block."""
        count = num_bits(entry.weights, self.pattern)
        stored = self._handle.get_tensor(entry.mask_name)
        assert isinstance(stored, Tensor)
        if entry.gaps is None and count % 8 and int(stored[-1]) >> count % 8:
            self.refuse(f"has a mask of {entry.name} with bits set after its end")
        assert entry.mask is not None
        self._check_sum(stored, entry.mask, f"a mask of {entry.name}")
        try:
            return stored if entry.gaps is None else from_gaps(stored, count)
        except GrowpruneError as error:
            self.refuse(f"has a mask of {entry.name} with {error}")

    def everything(self, *, copied: bool = False) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Return every tensor in the form of `SparseModel.restore`, fully checked.

        Args:
            copied: return private copies of prunable tensors; otherwise views of the file where possible.
        """

        def checked(entry: Entry) -> tuple[Tensor, Tensor | None]:
            if not entry.weights:
                return self.values(entry), None
            values, bits = self.live(entry)
            return (padded_copy(values), padded_copy(bits)) if copied else (values, bits)

        return self.each(checked)

    def each(self, read: Callable[[Entry], T]) -> dict[str, T]:
        """Apply a function to every tensor, and return the results by name. Large tensors use torch's thread count."""
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # checksums, and what numpy does, let others run
            large = {e.name: threads.submit(read, e) for e in self.entries.values() if e.num_bytes >= LARGE}
            small = {e.name: read(e) for e in self.entries.values() if e.name not in large}
            return {name: large[name].result() if name in large else small[name] for name in self.entries}

    def live(self, entry: Entry) -> tuple[Tensor, Tensor]:
        """Return the live values of a prunable parameter in its dtype, in row-major order, and its mask as bits.

        Both are checked, and views of the file where possible; int8 values are dequantized.
        """
        bits, values = self.bits(entry), self.values(entry)
        if entry.scales is None:
            return values, bits
        return dequantize(values, self.scales(entry), unpack(bits, entry.shape), entry.dtype), bits

    def scales(self, entry: Entry) -> Tensor:
        """Return the scales of int8 values, after checking them."""
        tensor = self._handle.get_tensor(f"{entry.name}.scales")
        assert isinstance(tensor, Tensor)
        assert entry.scales is not None
        self._check_sum(tensor, entry.scales, f"scales of {entry.name}")
        return tensor

    def values(self, entry: Entry) -> Tensor:
        """Return a tensor as it is stored, or the values of a prunable parameter in row-major order.

        It is a view of the file. Its checksum is checked.
        """
        tensor = self._handle.get_tensor(f"{entry.name}.values" if entry.is_sparse else entry.name)
        assert isinstance(tensor, Tensor)
        self._check_sum(tensor, entry.values, f"values of {entry.name}")
        return tensor.view(-1) if entry.weights else tensor

    def _check_sum(self, tensor: Tensor, saved: Digest, what: str) -> None:
        """Raise if bytes differ from those that were saved."""
        if crc32(tensor) != saved.crc32:
            self.refuse(f"has {what} whose CRC-32 does not match the manifest")
        if self._thorough and sha256(bytes_of(tensor)) != saved.sha256:
            self.refuse(f"has {what} whose SHA-256 does not match the manifest")

    def dense(self, entry: Entry) -> Tensor:
        if not entry.weights:
            return self.values(entry).clone()
        values, bits = self.live(entry)
        if not entry.is_sparse:
            return values.view(entry.shape).clone()
        dense, mask = torch.empty(entry.numel, dtype=values.dtype), torch.empty(entry.numel, dtype=torch.bool)
        scatter_live(dense, mask, values, bits)
        return dense.view(entry.shape)

    def make_sparse(self, model: nn.Module, storage: str) -> SparseModel:
        settings = {name: self.manifest[name] for name in SETTINGS}
        try:
            self._check_weights(model)
            return SparseModel(model, storage=storage, **settings)
        except (KeyError, TypeError, ValueError) as error:
            raise GrowpruneError(f"{self.path} does not fit the model: {one_line(error)}") from error

    def refuse(self, why: str, what_to_do: str = "it is damaged, download or save it again") -> NoReturn:
        raise GrowpruneError(f"{self.path} {one_line(why)}: {what_to_do}")

    def _check_version(self, metadata: Mapping[str, str]) -> str:
        if metadata.get("format") != FORMAT:
            self.refuse("is not a growprune file", "load plain safetensors with safetensors.torch.load_file")
        version = metadata.get("version")
        if version == "1":
            self.refuse(
                "has version '1' of the format, which was never released and is no longer read", "save it again"
            )
        if version is None or version not in VERSIONS:
            known = ", ".join(map(repr, VERSIONS))
            self.refuse(f"has version {version!r} of the format, this growprune reads {known}", "update growprune")
        return version

    def _read_manifest(self, manifest: Mapping[str, Any]) -> None:
        for name, kind in SETTINGS.items():
            if not isinstance(manifest[name], kind):
                raise GrowpruneError(f"{name} is {manifest[name]!r}")
        for name in (*manifest["keep_dense"], *manifest["include"]):
            if not isinstance(name, str) or len(name) > MAX_NAME:
                raise GrowpruneError(f"a name must be a string of at most {MAX_NAME} characters, got {repr(name)[:60]}")
        self.manifest = {name: manifest[name] for name in (*SETTINGS, "num_edits", "aliases", "tensors")}
        self.pattern = parse_pattern(manifest["pattern"])
        check_blocks(self.pattern)
        self.num_edits = whole(manifest["num_edits"])
        self.entries = {name: parse_entry(name, about) for name, about in manifest["tensors"].items()}
        self.aliases = {str(alias): str(name) for alias, name in manifest["aliases"].items()}

    def _check_weights(self, model: nn.Module) -> None:
        """Raise if the model would be pruned in other places, before it is made sparse."""
        names = {name: self.manifest[name] for name in ("keep_dense", "include")}
        weights = prunable_weights(model, **names)
        for name in dict.fromkeys([*(w.parameter for w in weights), *(e.name for e in self.prunable)]):
            mine = [(w.rows, w.transposed) for w in weights if w.parameter == name]
            if mine != [(w.rows, w.transposed) for w in self.entries[name].weights]:
                raise GrowpruneError(f"the file has other matrices in {name}: build the model that was saved")

    def _check_header(self) -> None:
        """Raise unless the file has exactly the tensors of the manifest, with its dtypes and shapes."""
        expected: dict[str, tuple[str, list[int]]] = {}
        for entry in self.entries.values():
            dtype = DTYPES[entry.stored_dtype]
            if entry.scales is not None:
                expected[f"{entry.name}.scales"] = "F32", list(entry.scale_shape)
            if entry.is_sparse:
                expected[f"{entry.name}.values"] = dtype, [entry.nnz]
                expected[entry.mask_name] = self._expected_mask(entry)
            else:
                expected[entry.name] = dtype, list(entry.shape)
        for name in sorted(expected.keys() ^ set(self._handle.keys())):
            self.refuse(f"lacks tensor {name}" if name in expected else f"has tensor {name}, which its manifest lacks")
        for name, (dtype, shape) in expected.items():
            found = self._handle.get_slice(name)
            if (found.get_dtype(), found.get_shape()) != (dtype, shape):
                has = f"{found.get_dtype()} {found.get_shape()}"
                self.refuse(f"has tensor {name} as {has}, but its manifest says {dtype} {shape}")
        for alias, name in self.aliases.items():
            if alias in self.entries or name not in self.entries:
                self.refuse(f"has {alias} as another name of {name}, which is invalid")

    def _expected_mask(self, entry: Entry) -> tuple[str, list[int]]:
        if entry.gaps is None:
            return "U8", [num_mask_bytes(entry.weights, self.pattern)]
        if not self.pattern.bit_pattern.is_single:
            self.refuse(f"has gaps for {entry.name}, but masks of blocks are stored as bits")
        return GAP_DTYPES[entry.gaps.dtype], [entry.gaps.length]


@contextlib.contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file, or raise an error of one line."""
    try:
        handle: Any = safe_open(path, framework="pt")
    except SafetensorError as error:
        reason = str(error).rpartition(": ")[2]
        with path.open("rb") as file:
            is_zip = file.read(2) == b"PK"
        instead = "it looks like a checkpoint of torch, which `growprune convert` reads" if is_zip else ""
        raise GrowpruneError(
            f"{path} is not a safetensors file, or is incomplete ({reason}): {instead or 'download or save it again'}"
        ) from None
    with handle:
        yield handle


def is_ours(handle: Any) -> bool:
    """True if growprune saved an open safetensors file."""
    return bool((handle.metadata() or {}).get("format") == FORMAT)


@contextlib.contextmanager
def open_sparse(path: str | os.PathLike[str], *, thorough: bool = False) -> Iterator[SparseFile]:
    """Open a sparse file.

    Args:
        thorough: check the SHA-256 of what is read too, not only its CRC-32.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file: pass the path of a file that growprune saved")
    with open_safetensors(path) as handle:
        yield SparseFile(path, handle, thorough=thorough)


def one_line(content: object) -> str:
    """Shorten a string or error from an untrusted file, and remove line breaks and control characters."""
    text = str(content) or type(content).__name__
    shown = text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."
    return "".join(character if character.isprintable() else " " for character in shown)


def _wrapping(names: Iterable[str]) -> str:
    """Return the prefix that torch.compile or DataParallel adds to all names."""
    return next((prefix for prefix in ("_orig_mod.", "module.") if all(n.startswith(prefix) for n in names)), "")


def match_model(file: SparseFile, model: nn.Module) -> None:
    """Raise unless a model has the tensors of the file, with the same names, shapes and dtypes."""
    if any(map(is_compact, model.modules())):
        file.refuse("cannot be loaded into a model with storage='compact'", "load it into a new model")
    tensors, aliases = tensors_of(model)
    build = "build the model that was saved"
    in_file, needed = {**file.entries, **file.aliases}, {**tensors, **aliases}
    if (here := _wrapping(needed)) != (there := _wrapping(in_file)):
        file.refuse(
            f"has names that begin with {there!r}, but those of the model begin with {here!r}",
            "wrap the model as saved",
        )
    for name in sorted(in_file.keys() ^ needed.keys()):
        file.refuse(
            f"lacks {name}, which the model has" if name in needed else f"has {name}, which the model lacks", build
        )
    for alias, name in sorted(aliases.items() ^ file.aliases.items()):
        where = "model" if alias in aliases else "file"
        file.refuse(f"does not fit the model: {alias} and {name} are tied only in the {where}", build)
    for name, buffer in model.named_buffers():
        if name not in tensors and buffer.is_meta:
            file.refuse(
                f"cannot fill {name}, a non-persistent buffer on the meta device", "build that buffer on a real device"
            )
    for name, tensor in tensors.items():
        entry = file.entries[name]
        if entry.shape != tuple(tensor.shape):
            file.refuse(f"has {name} with shape {entry.shape}, but the model has {tuple(tensor.shape)}", build)
        if entry.dtype != tensor.dtype:
            file.refuse(
                f"has {name} as {entry.dtype}, but the model has {tensor.dtype}", f"call model.to({entry.dtype}) first"
            )
