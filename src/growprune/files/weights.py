"""Giving a sparse model, whatever its settings, the weights of a file: a sparse one, or plain safetensors."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.files.reader import SparseFile
from growprune.files.versions import FORMAT
from growprune.files.writer import tensors_of
from growprune.masks.bits import pack
from growprune.masks.layers import dense_shape
from growprune.sparse.internals import internals
from growprune.sparse.model import SparseModel

NAMES = ("growprune.safetensors", "model.safetensors")
"""The files of a folder that hold its weights; the first that is there counts."""


class Source(Protocol):
    """The tensors of a file, dense, and which of their weights live."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def tensor(self, name: str) -> Tensor: ...
    def mask(self, name: str) -> Tensor: ...


class _Sparse:
    """A file that growprune saved."""

    def __init__(self, file: SparseFile) -> None:
        self._file = file
        self._entries = file.entries | {alias: file.entries[name] for alias, name in file.aliases.items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}

    def tensor(self, name: str) -> Tensor:
        return self._file.dense(self._entries[name])

    def mask(self, name: str) -> Tensor:
        return self._file.mask(self._entries[name])


class _Plain:
    """Safetensors as anyone saves them: what is zero is dead."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._handle.get_tensor(name)
        return tensor

    def mask(self, name: str) -> Tensor:
        return self.tensor(name) != 0


def is_sparse_file(path: Path) -> bool:
    """Whether growprune saved a safetensors file."""
    with _opened(path) as handle:
        return bool((handle.metadata() or {}).get("format") == FORMAT)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        handle: Any = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise GrowpruneError(f"{path} is not a safetensors file, or not all of it ({error}): fetch it again") from None
    with handle:
        yield handle


def weights_file(path: str | os.PathLike[str]) -> Path:
    """The file that a path means: itself, or that with the weights of a folder, of a run or a pretrained model."""
    path = Path(path)
    if path.is_file():
        return path
    found = [path / name for name in NAMES if (path / name).is_file()]
    if not found:
        raise GrowpruneError(
            f"{path} holds no weights: give a .safetensors file, or a folder with {' or '.join(NAMES)}, such as that "
            f"of a finished run"
        )
    return found[0]


def digest_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_weights(sparse: SparseModel, path: str | os.PathLike[str], *, with_masks: bool = False) -> None:
    """Give a model, all of whose weights live, the tensors of a file; all it has must be there, and nothing else.

    Args:
        with_masks: let only those weights live that live in the file; of a plain file, those that are not zero.
    """
    path = weights_file(path)
    with _opened(path) as handle:
        is_ours = (handle.metadata() or {}).get("format") == FORMAT
        source: Source = _Sparse(SparseFile(path, handle)) if is_ours else _Plain(handle)
        names = _names_in(source, sparse, path)
        internals(sparse).restore(_Tensors(sparse, source, names, with_masks=with_masks))


def _names_in(source: Source, sparse: SparseModel, path: Path) -> dict[str, str]:
    """By what the file calls it, under any of its names, each tensor of the model; raises unless they fit."""
    tensors, aliases = tensors_of(sparse.model)
    names: dict[str, str] = {}
    for name, tensor in tensors.items():
        known = [name, *(alias for alias, first in aliases.items() if first == name)]
        here = next((n for n in known if n in source.shapes), None)
        if here is None:
            raise GrowpruneError(f"{path} lacks {name}, which the model has: give the weights of the same model")
        if source.shapes[here] != (shape := _shape(sparse, name, tensor)):
            raise GrowpruneError(f"{path} has {here} with shape {source.shapes[here]}, but the model with {shape}")
        names[name] = here
    if unknown := sorted(set(source.shapes) - set(tensors) - set(aliases)):
        raise GrowpruneError(f"{path} has {unknown[0]}, which the model lacks: give the weights of the same model")
    return names


def _shape(sparse: SparseModel, name: str, tensor: Tensor) -> tuple[int, ...]:
    if all(weight.parameter != name for weight in sparse.weights):
        return tuple(tensor.shape)
    path, _, local = name.rpartition(".")
    return dense_shape(sparse.model.get_submodule(path), local)


class _Tensors(Mapping[str, tuple[Tensor, Tensor | None]]):
    """What `Internals.restore` takes, read from a file one tensor at a time."""

    def __init__(self, sparse: SparseModel, source: Source, names: Mapping[str, str], *, with_masks: bool) -> None:
        self._sparse, self._source, self._names, self._with_masks = sparse, source, names, with_masks

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> tuple[Tensor, Tensor | None]:
        tensor = self._source.tensor(self._names[name])
        weights = [weight for weight in self._sparse.weights if weight.parameter == name]
        if not weights:
            return tensor, None
        mask = torch.ones(tensor.shape, dtype=torch.bool)
        if self._with_masks:
            theirs = self._source.mask(self._names[name])
            for weight in weights:  # what the model keeps dense lives, whatever it does in the file
                weight.of(mask).copy_(weight.of(theirs))
        return tensor[mask], pack(mask)
