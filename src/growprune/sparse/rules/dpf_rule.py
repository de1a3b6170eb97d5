"""DPF: the model has m * w, and steps are done to the dense w, which is kept aside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from growprune.methods.dpf import Dpf
from growprune.plan import prune
from growprune.sparse.model import SparseModel
from growprune.sparse.rules.base import AsideRule, Iterations
from growprune.storage.masked import zero_off


class DpfRule(AsideRule):
    """Use the gradient at m * w for w, and recompute m at regular intervals."""

    def __init__(self, rule: Dpf, own: SparseModel) -> None:
        super().__init__(own, rule.part, "DPF needs all weights dense")
        self.rule = rule
        for weight in self.weights:  # the first that is pruned is the least sparse, and a pattern may forbid it
            own.pattern.check(weight, rule.target(0) or rule.target(rule.every))
        self._iterations = Iterations()
        self._target = 0.0
        self.m: dict[str, Tensor] = {}

    @torch.no_grad()
    def enter(self) -> None:
        self.begin()
        self._prune()

    @torch.no_grad()
    def before_step(self, trained: Mapping[str, float]) -> None:
        if own := self.ours(trained):
            self._iterations.step(own)
            self.put_in(own)

    @torch.no_grad()
    def after_step(self, trained: Mapping[str, float]) -> None:
        own = self.ours(trained)
        if not own:
            return
        self.take_out(own)
        if self._iterations.begun % self.rule.every == 0:
            self._prune()  # after the step of each optimizer, so that the last one's mask is made of all new weights
        else:
            self._mask(own)

    def _prune(self) -> None:
        self._target = self.rule.target(self._iterations.begun)
        if self._target > 0:
            self.m = self._own.editor.kept(prune(self.rule.part, to=self._target), self.w)
            self.put_in(self.m)
            self._mask(list(self.m))

    def _mask(self, names: list[str]) -> None:
        for name in names if self.m else ():
            zero_off(self.m[name], self.parameter(name))

    def figures(self) -> dict[str, float]:
        return {"sparsity": self._target}

    def state_dict(self) -> dict[str, Any]:
        place = {"iteration": self._iterations.begun, "target": self._target}
        return {**place, "w": self.saved(), "m": dict(self.m)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._iterations.resume(state["iteration"])
        self._target = state["target"]
        self.load_aside(state["w"])
        self.m = self.here(state["m"])
