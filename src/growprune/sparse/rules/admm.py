"""ADMM: the weights W are pulled towards Z, their projection onto sparse weights, with the scaled dual variable U."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.methods.admm import Admm
from growprune.plan import prune
from growprune.sparse.model import SparseModel


class AdmmRule:
    """Adds rho (W - Z + U) to the gradients, and every so often makes Z and U anew."""

    def __init__(self, rule: Admm, sparse: SparseModel) -> None:
        if sparse.storage != "masked":
            raise GrowpruneError(
                f"ADMM needs all weights dense, but storage is {sparse.storage!r}: use storage='masked'"
            )
        self.rule, self._sparse = rule, sparse
        self._names = tuple(dict.fromkeys(weight.parameter for weight in sparse.editor.counts.weights_of(rule.part)))
        self._iteration = 0
        """How many iterations have begun."""
        self._pulled: set[str] = set()
        """The weights that have been pulled in the last of them."""
        self.Z: dict[str, Tensor] = {}
        self.U: dict[str, Tensor] = {}

    @property
    def W(self) -> dict[str, Tensor]:
        return {name: self._sparse.model.get_parameter(name) for name in self._names}

    def enter(self) -> None:
        pass  # Z and U are made of the weights as the first step finds them

    @torch.no_grad()
    def before_step(self, trained: Mapping[str, float]) -> None:
        own = [name for name in self._names if name in trained]
        if not own:
            return
        if not self._pulled or not self._pulled.isdisjoint(own):  # of several optimizers, one steps again
            self._begin_iteration()
        self._pulled.update(own)
        for name, w in self.W.items():
            if w.grad is not None and name in own:
                w.grad.add_(w - self.Z[name] + self.U[name], alpha=self.rule.rho)

    def after_step(self, trained: Mapping[str, float]) -> None:
        pass

    def figures(self) -> dict[str, float]:
        return {}

    def _begin_iteration(self) -> None:
        W = self.W
        if self._iteration == 0:
            self.U = {name: torch.zeros_like(w) for name, w in W.items()}
            self.Z = self._project(W)
        elif self._iteration % self.rule.every == 0:
            self.Z = self._project({name: w + self.U[name] for name, w in W.items()})
            self.U = {name: self.U[name] + w - self.Z[name] for name, w in W.items()}
        self._iteration, self._pulled = self._iteration + 1, set()

    def _project(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._sparse.editor.projected(prune(self.rule.part, to=self.rule.to), values)

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self._iteration, "Z": dict(self.Z), "U": dict(self.U)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        device = {name: w.device for name, w in self.W.items()}
        self._iteration, self._pulled = state["iteration"], set()
        self.Z, self.U = ({name: t.to(device[name]) for name, t in state[key].items()} for key in ("Z", "U"))
