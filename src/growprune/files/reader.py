"""Read tensors and masks from a sparse file, in which nothing is trusted. docs/file-format.md specifies the format.

First its header: the version, the manifest, and an entry for each tensor, which `writer` writes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.masks.bits import (
    MAX_EXPANSION,
    from_gaps,
    num_bits,
    num_mask_bytes,
    num_outside,
    pack,
    row_major,
    unpack,
)
from growprune.masks.layers import Weight, dense_shape, is_compact, prunable_weights, tensors_of
from growprune.masks.patterns import Pattern, parse_pattern
from growprune.sparse.model import SparseModel
from growprune.storage.kernels import count_bits, padded_copy, scatter_live

T = TypeVar("T")

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


# Reading

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

    def __init__(self, path: Path, handle: Any) -> None:
        self.path, self.num_bytes, self._handle = path, path.stat().st_size, handle
        metadata = handle.metadata() or {}
        if metadata.get("format") != FORMAT:
            self.refuse("is not a growprune file", "load plain safetensors with safetensors.torch.load_file")
        if (version := metadata.get("version")) != VERSION:
            self.refuse(
                f"has version {version!r} of the format, this growprune reads {VERSION!r}",
                "save it again, or update growprune",
            )
        try:
            text = metadata["manifest"]
            if str(zlib.crc32(text.encode())) != metadata["manifest_crc32"]:
                raise GrowpruneError("its CRC-32 does not match")
            manifest = json.loads(text)
            if not isinstance(manifest, dict):
                raise GrowpruneError("it is not a JSON object")
            for name, kind in SETTINGS.items():
                if not isinstance(manifest[name], kind):
                    raise GrowpruneError(f"{name} is {manifest[name]!r}")
            for name in (*manifest["keep_dense"], *manifest["include"]):
                if not isinstance(name, str) or len(name) > MAX_NAME:
                    raise GrowpruneError(
                        f"a name must be a string of at most {MAX_NAME} characters, got {repr(name)[:60]}"
                    )
            self.manifest = {name: manifest[name] for name in (*SETTINGS, "num_edits", "aliases", "tensors")}
            self.pattern = parse_pattern(manifest["pattern"])
            check_blocks(self.pattern)
            self.num_edits = whole(manifest["num_edits"])
            self.entries = {name: parse_entry(name, about) for name, about in manifest["tensors"].items()}
            self.aliases = {str(alias): str(name) for alias, name in manifest["aliases"].items()}
        except GrowpruneError as error:
            self.refuse(f"has an invalid manifest ({error})")
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            self.refuse(f"has an invalid manifest ({type(error).__name__}: {error})")
        # the file must have exactly the tensors of the manifest, with its dtypes and shapes
        expected: dict[str, tuple[str, list[int]]] = {}
        for entry in self.entries.values():
            dtype = DTYPES[entry.dtype]
            if entry.is_sparse:
                expected[f"{entry.name}.values"] = dtype, [entry.nnz]
                if entry.gaps is None:
                    expected[entry.mask_name] = "U8", [num_mask_bytes(entry.weights, self.pattern)]
                elif self.pattern.bit_pattern.is_single:
                    expected[entry.mask_name] = GAP_DTYPES[entry.gaps.dtype], [entry.gaps.length]
                else:
                    self.refuse(f"has gaps for {entry.name}, but masks of blocks are stored as bits")
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

    @property
    def prunable(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.weights]

    def mask(self, entry: Entry) -> Tensor:
        """Return the mask as bools, after checking it against the manifest and the number of values."""
        return unpack(self.bits(entry), entry.shape) if entry.is_sparse else torch.ones(entry.shape, dtype=torch.bool)

    def bits(self, entry: Entry) -> Tensor:
        """Return the mask as bits in row-major order, eight to a byte, the first in the lowest bit.

        It is checked as in `mask`. If the file stores exactly these bits, it is a view of the file.
        """
        if not entry.is_sparse:
            return pack(torch.ones(entry.numel, dtype=torch.bool))
        count = num_bits(entry.weights, self.pattern)  # of the matrices, one per weight or block
        stored = self._checked(entry.mask_name, entry.mask_crc32, f"a mask of {entry.name}")
        if entry.gaps is None and count % 8 and int(stored[-1]) >> count % 8:
            self.refuse(f"has a mask of {entry.name} with bits set after its end")
        try:
            stored = stored if entry.gaps is None else from_gaps(stored, count)
        except GrowpruneError as error:
            self.refuse(f"has a mask of {entry.name} with {error}")
        bits = row_major(stored, entry.shape, entry.weights, self.pattern)
        if (alive := count_bits(bits)) != entry.nnz:
            self.refuse(f"has a mask of {entry.name} with {alive} live weights, but {entry.nnz} values")
        return bits

    def values(self, entry: Entry) -> Tensor:
        """Return a tensor as it is stored, or the values of a prunable parameter in row-major order, as a view."""
        name = f"{entry.name}.values" if entry.is_sparse else entry.name
        tensor = self._checked(name, entry.crc32, f"values of {entry.name}")
        return tensor.view(-1) if entry.weights else tensor

    def dense(self, entry: Entry) -> Tensor:
        if not entry.weights:
            return self.values(entry).clone()
        bits, values = self.bits(entry), self.values(entry)
        if not entry.is_sparse:
            return values.view(entry.shape).clone()
        dense, mask = torch.empty(entry.numel, dtype=values.dtype), torch.empty(entry.numel, dtype=torch.bool)
        scatter_live(dense, mask, values, bits)
        return dense.view(entry.shape)

    def everything(self, *, copied: bool = False) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Return every tensor in the form of `SparseModel.restore`, fully checked.

        Args:
            copied: return private copies of prunable tensors; otherwise views of the file where possible.
        """

        def checked(entry: Entry) -> tuple[Tensor, Tensor | None]:
            if not entry.weights:
                return self.values(entry), None
            bits, values = self.bits(entry), self.values(entry)
            return (padded_copy(values), padded_copy(bits)) if copied else (values, bits)

        return self.each(checked)

    def each(self, read: Callable[[Entry], T]) -> dict[str, T]:
        """Apply a function to every tensor, and return the results by name. Large tensors use torch's thread count."""
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # checksums, and what numpy does, let others run
            large = {e.name: threads.submit(read, e) for e in self.entries.values() if e.num_bytes >= LARGE}
            small = {e.name: read(e) for e in self.entries.values() if e.name not in large}
            return {name: large[name].result() if name in large else small[name] for name in self.entries}

    def _checked(self, name: str, saved: int | None, what: str) -> Tensor:
        """Return a tensor of the file. Raise if its bytes differ from those that were saved."""
        tensor: Tensor = self._handle.get_tensor(name)
        if crc32(tensor) != saved:
            self.refuse(f"has {what} whose CRC-32 does not match the manifest")
        return tensor

    def make_sparse(self, model: nn.Module, storage: str) -> SparseModel:
        """Make a model sparse with the settings of the file. Raise if other matrices of it would be pruned."""
        settings = {name: self.manifest[name] for name in SETTINGS}
        try:
            weights = prunable_weights(model, keep_dense=settings["keep_dense"], include=settings["include"])
            for name in dict.fromkeys([*(w.parameter for w in weights), *(e.name for e in self.prunable)]):
                mine = [(w.rows, w.transposed) for w in weights if w.parameter == name]
                if mine != [(w.rows, w.transposed) for w in self.entries[name].weights]:
                    raise GrowpruneError(f"the file has other matrices in {name}: build the model that was saved")
            return SparseModel(model, storage=storage, **settings)
        except (KeyError, TypeError, ValueError) as error:
            raise GrowpruneError(f"{self.path} does not fit the model: {one_line(error)}") from error

    def refuse(self, why: str, what_to_do: str = "it is damaged, download or save it again") -> NoReturn:
        raise GrowpruneError(f"{self.path} {one_line(why)}: {what_to_do}")


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


@contextlib.contextmanager
def open_sparse(path: str | os.PathLike[str]) -> Iterator[SparseFile]:
    """Open a sparse file."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file: pass the path of a file that growprune saved")
    with open_safetensors(path) as handle:
        yield SparseFile(path, handle)


def one_line(content: object) -> str:
    """Shorten a string or error from an untrusted file, and remove line breaks and control characters."""
    text = str(content) or type(content).__name__
    shown = text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."
    return "".join(character if character.isprintable() else " " for character in shown)


def match_model(file: SparseFile, model: nn.Module) -> None:
    """Raise unless a model has the tensors of the file, with the same names, shapes and dtypes."""
    if any(map(is_compact, model.modules())):
        file.refuse("cannot be loaded into a model with storage='compact'", "load it into a new model")
    tensors, aliases = tensors_of(model)
    build, shapes = "build the model that was saved", {name: entry.shape for name, entry in file.entries.items()}
    shapes |= {alias: shapes[first] for alias, first in file.aliases.items()}
    for name, theirs in matching_names(shapes, model, str(file.path), build).items():
        if theirs not in (name, *aliases):
            file.refuse(f"has {theirs}, which is {name} in the model", "wrap the model as saved")
    for alias, name in sorted(aliases.items() ^ file.aliases.items()):
        where = "model" if alias in aliases else "file"
        file.refuse(f"does not fit the model: {alias} and {name} are tied only in the {where}", build)
    for name, buffer in model.named_buffers():
        if name not in tensors and buffer.is_meta:
            file.refuse(
                f"cannot fill {name}, a non-persistent buffer on the meta device", "build that buffer on a real device"
            )
    for name, tensor in tensors.items():
        if (dtype := file.entries[name].dtype) != tensor.dtype:
            file.refuse(f"has {name} as {dtype}, but the model has {tensor.dtype}", f"call model.to({dtype}) first")


def matching_names(
    theirs: Mapping[str, Any], model: nn.Module, where: str, do: str = "build the same model"
) -> dict[str, str]:
    """Map each tensor of a model to its name in the source. Raise unless exactly these exist, with these shapes.

    The names of the source may have another common prefix, such as "model." in a checkpoint of Lightning.

    Args:
        theirs: the shapes of the source's tensors, by all of their names.
    """
    ours, aliases = tensors_of(model)
    words = {name.partition(".")[0] for name in theirs}
    has_prefix = len(words) == 1 and all("." in name for name in theirs) and not {*ours, *aliases} & set(theirs)
    prefix = f"{words.pop()}." if has_prefix else ""
    shapes = {name.removeprefix(prefix): shape for name, shape in theirs.items()}
    names: dict[str, str] = {}
    for name, tensor in ours.items():
        known = [name, *(alias for alias, first in aliases.items() if first == name)]
        here = next((n for n in known if n in shapes), None)
        if here is None:
            has = f"it has names like {next(iter(theirs), 'none')!r}"
            raise GrowpruneError(f"{where} lacks {name}, which the model has; {has}: {do}")
        path, _, local = name.rpartition(".")
        module = model.get_submodule(path)
        shape = dense_shape(module, local) if local in module._parameters else tuple(tensor.shape)
        if tuple(shapes[here]) != shape:
            has = f"{tuple(shapes[here])}, but the model has {shape}"
            raise GrowpruneError(f"{where} has {here} with shape {has}: {do}")
        names[name] = prefix + here
    if unknown := sorted(set(shapes) - set(ours) - set(aliases)):
        raise GrowpruneError(f"{where} has {unknown[0]}, which the model lacks: {do}")
    return names
