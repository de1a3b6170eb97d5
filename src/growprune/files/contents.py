"""Every tensor of a sparse file, looked at in full: what it takes, and whether it is as it was saved."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.files.entries import Entry
from growprune.files.masks import num_mask_bytes
from growprune.files.reader import SparseFile, open_sparse

State = Literal["ok", "damaged", "unknown"]


@dataclass(frozen=True)
class StoredTensor:
    name: str
    shape: tuple[int, ...]
    is_prunable: bool
    alive: int
    """How many elements live; all, of what is not prunable."""
    num_bytes: int
    """In the file: values and mask."""
    dense_bytes: int
    state: State
    """Whether its bytes have the digest that was saved with them; "unknown" if none was, in a file of version 1."""

    @property
    def sparsity(self) -> float:
        size = 1
        for length in self.shape:
            size *= length
        return 1 - self.alive / size if size else 0.0


def contents(path: str | os.PathLike[str]) -> list[StoredTensor]:
    """The tensors of a sparse file, in its order. Reads and checks all of it; what is damaged is told, not raised."""
    with open_sparse(path, thorough=True) as file:
        return [_stored(file, entry) for entry in file.entries.values()]


def live_tensor(path: str | os.PathLike[str], name: str) -> tuple[Tensor, Tensor]:
    """The live values of a prunable tensor in row-major order, and one bit for each of its weights; all is checked.

    Bits are eight to a byte, the first in the lowest. No dense tensor is made, and no mask of bools where weights live
    or die by themselves. `open_sparse(path).live(name)` does the same for many tensors of a file that stays open.
    """
    with open_sparse(path) as file:
        values, bits = file.live(name)
        return values.clone(), bits.clone()  # of their own: what views a file is lost if it is written to


def _stored(file: SparseFile, entry: Entry) -> StoredTensor:
    alive = entry.nnz if entry.weights else entry.numel
    num_bytes = alive * entry.dtype.itemsize + (_num_mask_bytes(file, entry) if entry.is_sparse else 0)
    return StoredTensor(
        entry.name, entry.shape, bool(entry.weights), alive, num_bytes, entry.num_bytes, _state(file, entry)
    )


def _num_mask_bytes(file: SparseFile, entry: Entry) -> int:
    if entry.gaps is not None:
        return entry.gaps.length * entry.gaps.dtype.itemsize
    return num_mask_bytes(entry.weights, file.pattern)


def _state(file: SparseFile, entry: Entry) -> State:
    try:
        file.values(entry)
        file.bits(entry)
    except GrowpruneError:
        return "damaged"
    return "unknown" if entry.sha256 is None else "ok"
