"""STR: the model has sign(w) relu(|w| - sigmoid(s)), and steps are done to w, which is kept aside, and to s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from growprune.methods.str_ import Str
from growprune.sparse.internals import Internals
from growprune.sparse.rules.aside import Aside
from growprune.sparse.rules.base import RunningRule, check_rates


class StrRule(RunningRule):
    """Turns the gradient of what the model has into those of w and s, and trains s.

    Clipping sees the gradients of what the model has, since it comes before.
    """

    def __init__(self, rule: Str, own: Internals) -> None:
        self.rule = rule
        self.w = Aside(own, rule.part, "STR")
        self.s: dict[str, Tensor] = {}
        """By the name of a weight; a number each."""

    @torch.no_grad()
    def enter(self) -> None:
        self.w.begin()
        for weight in self.w.weights:
            w = self.w.values[weight.parameter]
            dtype = torch.promote_types(w.dtype, torch.float32)
            self.s[weight.name] = torch.tensor(float(self.rule.s_init), dtype=dtype, device=w.device)
        self._shrink(self.w.names)

    @torch.no_grad()
    def before_step(self, trained: Mapping[str, float]) -> None:
        check_rates("STR", {name: rate for name, rate in trained.items() if name in self.w.names})
        for weight in self.w.weights:
            gradient = self.w.gradient(weight.parameter)
            if weight.parameter in trained and gradient is not None:
                g, w, s = weight.of(gradient), weight.of(self.w.values[weight.parameter]), self.s[weight.name]
                t = s.sigmoid()
                g.mul_(w.abs() > t)  # where the model has zeros, w does not count
                of_s = -(g * w.sign()).sum(dtype=s.dtype) * t * (1 - t)
                of_s += self.rule.s_decay * s
                s.mul_(1 - self.rule.s_shrink).sub_(of_s, alpha=trained[weight.parameter])
        self.w.put_in(name for name in self.w.names if name in trained)

    @torch.no_grad()
    def after_step(self, trained: Mapping[str, float]) -> None:
        own = tuple(name for name in self.w.names if name in trained)
        self.w.take_out(own)
        self._shrink(own)

    def _shrink(self, names: tuple[str, ...]) -> None:
        parameters = self.w.parameters
        for weight in self.w.weights:
            if weight.parameter in names:
                w, t = weight.of(parameters[weight.parameter]), self.s[weight.name].sigmoid()
                w.sub_(w.clamp(-t, t))  # so that what is zero is never a negative zero

    def figures(self) -> dict[str, float]:
        total = sum(weight.numel for weight in self.w.weights)
        parameters = self.w.parameters
        alive = sum(int(torch.count_nonzero(weight.of(parameters[weight.parameter]))) for weight in self.w.weights)
        return {"sparsity": 1 - alive / total if total else 0.0}

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w.state_dict(), "s": dict(self.s)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.w.load_state_dict(state["w"])
        device = {weight.name: self.w.values[weight.parameter].device for weight in self.w.weights}
        self.s = {name: torch.clone(s).to(device[name]) for name, s in state["s"].items()}
