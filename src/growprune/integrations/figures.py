"""What is worth logging of a sparse model that a trainer trains."""

from __future__ import annotations

import torch
from torch import Tensor

from growprune.sparse.cursor import Cursor
from growprune.sparse.internals import internals


class Figures:
    """What is worth logging of a sparse model.

    Args:
        by_weight: whether the density of each weight is told too.
    """

    def __init__(self, cursor: Cursor, *, by_weight: bool = False) -> None:
        self._cursor, self._by_weight = cursor, by_weight
        own = internals(cursor.sparse)
        self._num_changes, self._masks = own.num_mask_changes, own.packed_masks()

    def read(self) -> dict[str, float]:
        """Sparsity, live weights, phase, and churn: the share of live weights that were dead at the last reading."""
        sparse = self._cursor.sparse
        alive = internals(sparse).alive_by_weight()
        total = sum(alive.values())
        figures: dict[str, float] = {
            "sparsity": 1 - total / sparse.num_prunable,
            "live_weights": total,
            "phase": self._cursor.position,
            "churn": self._born() / max(1, total),
        }
        if self._by_weight:
            figures |= {f"density/{weight.name}": alive[weight.name] / weight.numel for weight in sparse.weights}
        rule = self._cursor.rule
        return figures if rule is None else figures | rule.figures()

    def _born(self) -> int:
        """How many weights live that were dead at the last reading."""
        own = internals(self._cursor.sparse)
        if own.num_mask_changes == self._num_changes:
            return 0
        before, self._masks = self._masks, own.packed_masks()
        self._num_changes = own.num_mask_changes
        return sum(_ones(mask & ~before[name].to(mask.device)) for name, mask in self._masks.items())


def _ones(packed: Tensor) -> int:
    """How many bits are set in bytes."""
    counts = torch.bincount(packed.flatten().int(), minlength=256)
    return sum(int(count) * byte.bit_count() for byte, count in enumerate(counts.tolist()))
