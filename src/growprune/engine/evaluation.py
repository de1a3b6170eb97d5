"""Evaluating the model of a run, and which of the models that were validated is the best. Test data selects nothing."""

from __future__ import annotations

from typing import Any

import torch

from growprune.engine.best import Best
from growprune.engine.recipe import Recipe
from growprune.errors import GrowpruneError
from growprune.sparse.internals import internals
from growprune.sparse.model import SparseModel


class Evaluation:
    """Evaluates the model of a run as it is trained.

    Args:
        best: where the best model is kept.
    """

    def __init__(self, recipe: Recipe, sparse: SparseModel, device: torch.device, best: Best) -> None:
        self._recipe, self._sparse, self._device, self._best = recipe, sparse, device, best

    @torch.no_grad()
    def evaluate(self, split: Any) -> dict[str, float]:
        """The metrics of the model, as it is now, on a split of the task's data."""
        task, model = self._recipe.task, self._sparse.model.eval()
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._recipe.precision == "bf16"):
            metrics = task.evaluate(model, split, device=self._device)
        if task.metric not in metrics:
            raise GrowpruneError(f"the task's metric is {task.metric!r}, but evaluate() gave {', '.join(metrics)}")
        return {name: float(value) for name, value in metrics.items()}  # tensors and numpy's numbers too

    def validate(self, row: dict[str, Any], *, is_phase_end: bool) -> None:
        """Write into the row of an epoch how good the model is, and consider it as the best.

        Args:
            is_phase_end: whether the epoch ends with its phase.
        """
        row["validation"] = self.evaluate("validation")
        if row["branch"] is None and self._recipe.sparsity > 0:
            self._consider(row, is_candidate_due=is_phase_end or self._is_sparse_by_rule(row))

    def _is_sparse_by_rule(self, row: dict[str, Any]) -> bool:
        """Whether a rule has made as many zeros as are asked for, of weights that all live."""
        return bool(row.get("rule", {}).get("sparsity", 0.0) >= self._recipe.sparsity)

    def _consider(self, row: dict[str, Any], *, is_candidate_due: bool) -> None:
        """Keep the best model at the target sparsity: this one, or what it would be if it were pruned now."""
        where = {name: row[name] for name in ("stage", "epoch")}
        if self._sparse.is_at_target:
            self._best.consider(self._sparse, row["validation"], **where)
        elif self._recipe.candidates and is_candidate_due and internals(self._sparse).can_be_pruned:
            with internals(self._sparse).pruned():
                row["candidate"] = self.evaluate("validation")
                self._best.consider(self._sparse, row["candidate"], **where)

    def best_tested(self) -> dict[str, Any] | None:
        """The best model by validation data, with its test metrics, which select nothing. The model becomes it."""
        if not self._best.found:
            return None
        self._best.put_into(self._sparse)
        return {**self._best.found, "test": self.evaluate("test")}
