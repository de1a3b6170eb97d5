"""The best sparse model of a run, by validation data. Test data selects nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from growprune.engine.metric import Metric
from growprune.files import sparse_file as file
from growprune.masks.bits import Snapshot
from growprune.sparse.internals import internals
from growprune.sparse.model import SparseModel


class Best:
    """The best of the models considered so far.

    Args:
        path: the file it is kept in.
        metric: the number that says which is better.
        is_writer: whether this process keeps it; the others only know how good it was.
    """

    def __init__(self, path: Path, metric: Metric, *, is_writer: bool) -> None:
        self._path, self._metric, self._is_writer = path, metric, is_writer
        self.found: dict[str, Any] = {}
        self._model: Snapshot = {}

    def consider(self, sparse: SparseModel, metrics: dict[str, float], **where: Any) -> None:
        """Keep a model if none before was better; of equals, the one trained longer."""
        name = self._metric.name
        best = self.found["validation"][name] if self.found else math.nan
        if self._metric.is_as_good(metrics[name], than=best):
            self.found = {"validation": metrics, **where}
            if self._is_writer:
                self._model = internals(sparse).snapshot(device="cpu")
                file.save(sparse, self._path)

    def put_into(self, sparse: SparseModel) -> None:
        """Turn a model into the best one, and write its file, which a kill may have left one ahead."""
        internals(sparse).restore(self._model)
        file.save(sparse, self._path)

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.found, "model": self._model}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found, self._model = state["found"], state["model"]
