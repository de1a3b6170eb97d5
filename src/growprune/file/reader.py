"""From a file, in which nothing is trusted, to tensors and masks."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.file.entries import (
    DTYPES,
    Entry,
    bit_pattern,
    num_bits,
    num_mask_bytes,
    parse_entry,
    sha256,
    unpack_mask,
    whole,
)
from growprune.file.writer import tensors_of
from growprune.layers import is_compact
from growprune.patterns import parse_pattern
from growprune.sparse import SparseModel

FORMAT, VERSION = "growprune", "1"

SETTINGS = ("sparsity", "allocation", "pattern", "scope", "keep_dense", "include", "seed")


class SparseFile:
    """An open sparse file. Its header has been checked: whatever it says agrees with the tensors it holds."""

    def __init__(self, path: Path, handle: Any) -> None:
        self.path = path
        self.num_bytes = path.stat().st_size
        self._handle = handle
        self.manifest = self._read_manifest(handle.metadata() or {})
        try:
            self.pattern = parse_pattern(self.manifest["pattern"])
            self.num_edits = whole(self.manifest["num_edits"])
            self.entries = {name: parse_entry(name, about) for name, about in self.manifest["tensors"].items()}
            self.aliases = {str(alias): str(name) for alias, name in self.manifest["aliases"].items()}
            bit_pattern(self.pattern)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            self.refuse(f"has a manifest that makes no sense ({type(error).__name__}: {error})")
        self._check_header()

    @property
    def prunable(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.weights]

    def mask(self, entry: Entry) -> Tensor:
        """Which weights live. The bits must agree with the manifest and with the number of values."""
        if not entry.is_sparse:
            return torch.ones(entry.shape, dtype=torch.bool)
        packed = self._handle.get_tensor(f"{entry.name}.mask")
        used = num_bits(entry.weights, self.pattern) % 8
        if used and int(packed[-1]) >> used:
            self.refuse(f"has a mask of {entry.name} with bits set behind its end")
        if sha256(packed) != entry.mask_sha256:
            self.refuse(f"has a mask of {entry.name} whose SHA-256 is not the one in the manifest")
        mask = unpack_mask(packed, entry.shape, entry.weights, self.pattern)
        if (alive := int(torch.count_nonzero(mask))) != entry.nnz:
            self.refuse(f"has a mask of {entry.name} with {alive} alive, but {entry.nnz} values")
        return mask

    def values(self, entry: Entry) -> Tensor:
        """The tensor; of a prunable parameter, the live values in row-major order. It is a view of the file."""
        tensor = self._handle.get_tensor(f"{entry.name}.values" if entry.is_sparse else entry.name)
        assert isinstance(tensor, Tensor)
        return tensor.view(-1) if entry.weights else tensor

    def dense(self, entry: Entry) -> Tensor:
        if not entry.is_sparse:
            return self.values(entry).view(entry.shape).clone()
        return torch.zeros(entry.shape, dtype=entry.dtype).masked_scatter_(self.mask(entry), self.values(entry))

    def make_sparse(self, model: nn.Module, storage: str) -> SparseModel:
        try:
            sparse = SparseModel(model, storage=storage, **{name: self.manifest[name] for name in SETTINGS})
        except (KeyError, TypeError, ValueError) as error:
            raise GrowpruneError(f"{self.path} does not fit the model: {error}") from error
        for name in dict.fromkeys([*(w.parameter for w in sparse.weights), *(e.name for e in self.prunable)]):
            mine = [(w.rows, w.transposed) for w in sparse.weights if w.parameter == name]
            if mine != [(w.rows, w.transposed) for w in self.entries[name].weights]:
                self.refuse(f"prunes {name} otherwise than the model allows", "build the model that was saved")
        return sparse

    def refuse(self, why: str, what_to_do: str = "it is damaged, fetch or save it again") -> NoReturn:
        raise GrowpruneError(f"{self.path} {why}: {what_to_do}")

    def _read_manifest(self, metadata: Mapping[str, str]) -> dict[str, Any]:
        if metadata.get("format") != FORMAT:
            self.refuse("is not a growprune file", "load plain safetensors with safetensors.torch.load_file")
        if metadata.get("version") != VERSION:
            version = metadata.get("version")
            self.refuse(f"has version {version!r} of the format, this growprune reads {VERSION!r}", "update growprune")
        try:
            found = json.loads(metadata["manifest"])
        except (KeyError, RecursionError, ValueError):
            found = None
        return found if isinstance(found, dict) else self.refuse("has no manifest that can be read")

    def _check_header(self) -> None:
        """Whether there are just the tensors that the manifest promises, with its dtypes and shapes."""
        expected: dict[str, tuple[str, list[int]]] = {}
        for entry in self.entries.values():
            dtype = DTYPES[entry.dtype]
            if entry.is_sparse:
                expected[f"{entry.name}.values"] = dtype, [entry.nnz]
                expected[f"{entry.name}.mask"] = "U8", [num_mask_bytes(entry.weights, self.pattern)]
            else:
                expected[entry.name] = dtype, list(entry.shape)
        for name in sorted(expected.keys() ^ set(self._handle.keys())):
            self.refuse(f"lacks tensor {name}" if name in expected else f"has tensor {name}, which its manifest lacks")
        for name, (dtype, shape) in expected.items():
            held = self._handle.get_slice(name)
            if (held.get_dtype(), held.get_shape()) != (dtype, shape):
                has = f"{held.get_dtype()} {held.get_shape()}"
                self.refuse(f"has tensor {name} as {has}, but its manifest asks for {dtype} {shape}")
        for alias, name in self.aliases.items():
            if alias in self.entries or name not in self.entries:
                self.refuse(f"calls {name} also {alias}, which cannot be")


@contextlib.contextmanager
def open_sparse(path: str | os.PathLike[str]) -> Iterator[SparseFile]:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file: give the path of a file that growprune saved")
    try:
        handle = safe_open(path, framework="pt")
    except SafetensorError as error:
        reason = str(error).rpartition(": ")[2]
        raise GrowpruneError(
            f"{path} is not a safetensors file, or not all of it ({reason}): fetch or save it again"
        ) from None
    with handle:
        yield SparseFile(path, handle)


def _wrapping(names: Iterable[str]) -> str:
    """What torch.compile or DataParallel put before all names."""
    return next((prefix for prefix in ("_orig_mod.", "module.") if all(n.startswith(prefix) for n in names)), "")


def match_model(file: SparseFile, model: nn.Module) -> None:
    """Refuse a model whose tensors are not those of the file in name, shape and dtype."""
    if any(map(is_compact, model.modules())):
        file.refuse("cannot be loaded into a model that is held compact", "load it into a fresh one")
    tensors, aliases = tensors_of(model)
    build = "build the model that was saved"
    held, needed = {**file.entries, **file.aliases}, {**tensors, **aliases}
    if (here := _wrapping(needed)) != (there := _wrapping(held)):
        file.refuse(f"has names that begin with {there!r}, and those of the model with {here!r}", "wrap both alike")
    for name in sorted(held.keys() ^ needed.keys()):
        file.refuse(
            f"lacks {name}, which the model has" if name in needed else f"has {name}, which the model lacks", build
        )
    for alias, name in sorted(aliases.items() ^ file.aliases.items()):
        where = "model" if alias in aliases else "file"
        file.refuse(f"does not fit the model: {alias} and {name} are one tensor in the {where} only", build)
    for name, tensor in tensors.items():
        entry = file.entries[name]
        if entry.shape != tuple(tensor.shape):
            file.refuse(f"has {name} with shape {entry.shape}, but the model with {tuple(tensor.shape)}", build)
        if entry.dtype != tensor.dtype:
            file.refuse(
                f"has {name} as {entry.dtype}, but the model as {tensor.dtype}", f"call model.to({entry.dtype}) first"
            )
        if tensor.is_meta:
            file.refuse(f"cannot fill {name}, which is on the meta device", 'call model.to_empty(device="cpu") first')
