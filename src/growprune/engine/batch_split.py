"""Batches among replicas: the share of each, and whether all have the same."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from growprune.tasks.task import num_examples


def split(batch: Any, index: int, count: int) -> tuple[Any, float]:
    """A replica's share of a batch, and what share it is: every count-th example, from number `index` on.

    A replica for which no example is left gets one of another, which counts nothing.
    """
    if count == 1:
        return batch, 1.0
    total = num_examples(batch)
    size = len(range(index, total, count))
    taken = slice(index, None, count) if size else slice(0, 1)
    return _sliced(batch, taken), size / total


def _sliced(batch: Any, taken: slice) -> Any:
    if isinstance(batch, dict):
        return {name: _sliced(item, taken) for name, item in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(_sliced(item, taken) for item in batch)
    return batch[taken] if isinstance(batch, Tensor) else batch


def digest(batch: Any) -> str:
    """A text that is equal for equal batches."""
    if isinstance(batch, Tensor):
        return hashlib.sha256(batch.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    items = batch.items() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else None
    return repr(batch) if items is None else repr([digest(item) for item in items])
