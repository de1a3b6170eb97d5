"""Evaluates the model of a run, and keeps the best one by validation data. Test data selects nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from growprune.engine.recipe import Recipe
from growprune.errors import GrowpruneError
from growprune.files import sparse_file as file
from growprune.masks.bits import Snapshot
from growprune.runs.metric import Metric
from growprune.sparse.model import SparseModel


class Best:
    """The best model so far.

    Args:
        path: the file it is kept in.
        metric: decides which model is better.
        is_writer: True if this process writes the file. Other processes only keep the score.
    """

    def __init__(self, path: Path, metric: Metric, *, is_writer: bool) -> None:
        self._path, self._metric, self._is_writer = path, metric, is_writer
        self.found: dict[str, Any] = {}
        self._model: Snapshot = {}

    def consider(self, sparse: SparseModel, metrics: dict[str, float], **where: Any) -> None:
        """Keep a model if it is as good as the best so far. Among equals, the later one wins."""
        name = self._metric.name
        best = self.found["validation"][name] if self.found else math.nan
        if self._metric.is_as_good(metrics[name], than=best):
            self.found = {"validation": metrics, **where}
            if self._is_writer:
                self._model = sparse.snapshot(device="cpu")
                file.write_file(sparse, self._path)

    def put_into(self, sparse: SparseModel) -> None:
        """Load the best weights into a model, and write its file again: after a kill it may be newer than the state."""
        sparse.restore(self._model)
        file.write_file(sparse, self._path)

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.found, "model": self._model}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found, self._model = state["found"], state["model"]


class Evaluation:
    """Evaluates the model of a run as it is trained.

    Args:
        best: where the best model is kept.
    """

    def __init__(self, recipe: Recipe, sparse: SparseModel, device: torch.device, best: Best) -> None:
        self._recipe, self._sparse, self._device, self._best = recipe, sparse, device, best

    @torch.no_grad()
    def evaluate(self, split: Any) -> dict[str, float]:
        """The metrics of the current model on a split of the task's data."""
        task, model = self._recipe.task, self._sparse.model.eval()
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._recipe.precision == "bf16"):
            metrics = task.evaluate(model, split, device=self._device)
        if task.metric not in metrics:
            raise GrowpruneError(
                f"evaluate() of the task must return its metric {task.metric!r}, got {', '.join(metrics)}"
            )
        return {name: float(value) for name, value in metrics.items()}  # tensors and numpy's numbers too

    def validate(self, row: dict[str, Any], *, is_phase_end: bool) -> None:
        """Add the validation metrics to the row of an epoch, and consider the model as the best.

        Args:
            is_phase_end: True if the phase ends with this epoch.
        """
        row["validation"] = self.evaluate("validation")
        if row["branch"] is None and self._recipe.sparsity > 0:
            # of weights that all live, a rule may have made as many zeros as are asked for
            is_sparse_by_rule = row.get("rule", {}).get("sparsity", 0.0) >= self._recipe.sparsity
            self._consider(row, is_candidate_due=is_phase_end or is_sparse_by_rule)

    def _consider(self, row: dict[str, Any], *, is_candidate_due: bool) -> None:
        """Keep the best model at the target sparsity: the model itself, or the model pruned to it now."""
        where = {name: row[name] for name in ("stage", "epoch")}
        if self._sparse.is_at_target:
            self._best.consider(self._sparse, row["validation"], **where)
        elif self._recipe.candidates and is_candidate_due and self._sparse.can_be_pruned:
            with self._sparse.pruned():
                row["candidate"] = self.evaluate("validation")
                self._best.consider(self._sparse, row["candidate"], **where)

    def best_tested(self) -> dict[str, Any] | None:
        """Test metrics of the best model by validation data. Its weights replace those of the current model."""
        if not self._best.found:
            return None
        self._best.put_into(self._sparse)
        return {**self._best.found, "test": self.evaluate("test")}
