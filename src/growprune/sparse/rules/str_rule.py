"""STR: the model has sign(w) relu(|w| - sigmoid(s)), and steps are done to w, which is kept aside, and to s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from growprune.masks.patterns import in_one_go
from growprune.methods.str_ import Str
from growprune.sparse.model import SparseModel
from growprune.sparse.rules.base import AsideRule


class StrRule(AsideRule):
    """Convert the gradient of the model's weights into gradients of w and s, and train s.

    Clipping comes before, so it sees the gradients of the model's weights.
    """

    by_weight = ("s",)

    def __init__(self, rule: Str, own: SparseModel) -> None:
        super().__init__(own, rule.part, "STR needs all weights dense")
        self.rule = rule
        self.s: dict[str, Tensor] = {}
        """By the name of a weight; a number each."""

    @torch.no_grad()
    def enter(self) -> None:
        self.begin()
        for weight in self.weights:
            w = self.w[weight.parameter]
            dtype = torch.promote_types(w.dtype, torch.float32)
            self.s[weight.name] = torch.tensor(float(self.rule.s_init), dtype=dtype, device=w.device)
        self._shrink(self.names)

    @torch.no_grad()
    def before_step(self, trained: Mapping[str, float]) -> None:
        self.check_rates("STR", trained)
        for weight in self.weights:
            gradient = self.parameter(weight.parameter).grad
            if weight.parameter in trained and gradient is not None:
                g, w, s = weight.of(gradient), weight.of(self.w[weight.parameter]), self.s[weight.name]
                t = s.sigmoid()
                g.mul_(w.abs() > t)  # where the model has zeros, w does not count
                of_s = -(g * w.sign()).sum(dtype=s.dtype) * t * (1 - t)
                of_s += self.rule.s_decay * s
                s.mul_(1 - self.rule.s_shrink).sub_(of_s, alpha=trained[weight.parameter])
        self.put_in(self.ours(trained))

    @torch.no_grad()
    def after_step(self, trained: Mapping[str, float]) -> None:
        own = self.ours(trained)
        self.take_out(own)
        self._shrink(own)

    def _shrink(self, names: Sequence[str]) -> None:
        for weight in self.weights:
            if weight.parameter in names:
                w, t = weight.of(self.parameter(weight.parameter)), self.s[weight.name].sigmoid()
                w.sub_(w.clamp(-t, t))  # so that what is zero is never a negative zero

    def figures(self) -> dict[str, float]:
        total = sum(weight.numel for weight in self.weights)
        alive = sum(in_one_go([torch.count_nonzero(w.of(self.parameter(w.parameter))) for w in self.weights]))
        return {"sparsity": 1 - alive / total if total else 0.0}

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.saved(), "s": {name: s.clone() for name, s in self.s.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.load_aside(state["w"])
        device = {weight.name: self.w[weight.parameter].device for weight in self.weights}
        self.s = {name: torch.clone(s).to(device[name]) for name, s in state["s"].items()}
