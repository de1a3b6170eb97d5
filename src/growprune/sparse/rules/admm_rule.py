"""ADMM: the weights W are pulled towards Z, their projection onto sparse weights, with the scaled dual variable U."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from growprune.methods.admm import Admm
from growprune.plan import prune
from growprune.sparse.model import SparseModel
from growprune.sparse.rules.base import Iterations, RunningRule


class AdmmRule(RunningRule):
    """Add rho (W - Z + U) to the gradients, and update Z and U at regular intervals."""

    def __init__(self, rule: Admm, own: SparseModel) -> None:
        super().__init__(own, rule.part, "ADMM needs all weights dense")
        self.rule = rule
        self._iterations = Iterations()
        self.Z: dict[str, Tensor] = {}  # Z and U are made of the weights as the first step finds them
        self.U: dict[str, Tensor] = {}

    @property
    def W(self) -> dict[str, Tensor]:
        return {name: self.parameter(name) for name in self.names}

    @torch.no_grad()
    def before_step(self, trained: Mapping[str, float]) -> None:
        own = self.ours(trained)
        if own and self._iterations.step(own):
            self._begin_iteration(self._iterations.begun - 1)
        for name, w in self.W.items():
            if w.grad is not None and name in own:
                w.grad.add_(w - self.Z[name] + self.U[name], alpha=self.rule.rho)

    def _begin_iteration(self, number: int) -> None:
        W = self.W
        if number == 0:
            self.U = {name: torch.zeros_like(w) for name, w in W.items()}
            self.Z = self._project(W)
        elif number % self.rule.every == 0:
            self.Z = self._project({name: w + self.U[name] for name, w in W.items()})
            self.U = {name: self.U[name] + w - self.Z[name] for name, w in W.items()}

    def _project(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        masks = self._own.editor.kept(prune(self.rule.part, to=self.rule.to), values)
        return {name: torch.where(masks[name], tensor, 0) for name, tensor in values.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self._iterations.begun, "Z": dict(self.Z), "U": dict(self.U)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._iterations.resume(state["iteration"])
        self.Z, self.U = self.here(state["Z"]), self.here(state["U"])
