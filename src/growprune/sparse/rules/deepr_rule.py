"""DeepR: weights that change their sign die, and as many random dead ones of the same layer live instead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.masks.layers import Weight
from growprune.masks.patterns import in_one_go
from growprune.masks.ranking import choose, random_keys, salt_of
from growprune.methods.deepr import Deepr
from growprune.sparse.model import SparseModel
from growprune.sparse.rules.base import RunningRule


class DeeprRule(RunningRule):
    """Add the L1 gradient before each step; add noise and rewire after it."""

    counts = ("iteration",)

    def __init__(self, rule: Deepr, own: SparseModel) -> None:
        super().__init__(own, rule.part, "DeepR edits masks in every iteration")
        if not own.pattern.is_single:
            raise GrowpruneError(
                f"DeepR needs pattern='unstructured', because it uses the signs of single weights, got "
                f"{own.pattern.name!r}"
            )
        self.rule = rule
        self._iteration: dict[str, int] = {}
        """How many steps each parameter has had."""
        self._sign: dict[str, Tensor] = {}
        """Those before the step that is being done."""

    def enter(self) -> None:
        self._iteration = dict.fromkeys(self.names, 0)

    @torch.no_grad()
    def before_step(self, trained: Mapping[str, float]) -> None:
        self.check_rates("DeepR", trained)
        for name in self.ours(trained):
            parameter = self.parameter(name)
            self._sign[name] = parameter.sign()
            if parameter.grad is not None:
                parameter.grad.add_(self._sign[name], alpha=self.rule.l1)  # zero where nothing lives

    @torch.no_grad()
    def after_step(self, trained: Mapping[str, float]) -> None:
        masks = {name: self._own.stored[name].mask().clone() for name in self.ours(trained)}
        for name, mask in masks.items():
            self._shake(name, mask, trained[name])
        before = {name: self._sign.pop(name) for name in masks}  # what was zero is new, and gets its sign now
        died = {name: (sign != 0) & (self.parameter(name).sign() != sign) for name, sign in before.items()}
        self._rewire(masks, died)
        for name in masks:
            self._iteration[name] += 1
        self.num_rewirings += 1

    def _shake(self, name: str, mask: Tensor, lr: float) -> None:
        parameter, temperature = self.parameter(name), self.rule.temperature_at(self._iteration[name])
        generator = torch.Generator(parameter.device).manual_seed(self._salt(name, "noise") >> 1)
        noise = torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=parameter.dtype)
        parameter.add_(noise.mul_(mask), alpha=math.sqrt(2 * lr * temperature))

    def _rewire(self, masks: Mapping[str, Tensor], died: Mapping[str, Tensor]) -> None:
        weights = [weight for weight in self.weights if weight.parameter in masks]
        counts = in_one_go([torch.count_nonzero(weight.of(died[weight.parameter])) for weight in weights])
        changed = dict.fromkeys(weight.parameter for weight, count in zip(weights, counts, strict=True) if count)
        for name in changed:  # first, so that a revived weight starts from zero
            masks[name].logical_and_(~died[name])
            self._own.editor.set_mask(name, masks[name])
        for weight, count in zip(weights, counts, strict=True):
            if count:
                self._revive(weight, weight.of(masks[weight.parameter]), count)
        for name in changed:
            self._own.editor.set_mask(name, masks[name])

    def _revive(self, weight: Weight, mask: Tensor, count: int) -> None:
        """Make `count` random dead weights live in a mask."""
        keys = random_keys(0, mask.numel(), self._salt(weight.parameter, weight.name), mask.device)
        keys.mul_(~mask.reshape(-1))
        walks = choose([lambda: iter([keys.clone()])], count, device=keys.device)
        (chosen,) = (torch.cat(list(chunks)) for chunks in walks)
        mask.logical_or_(chosen.view(mask.shape))

    def _salt(self, parameter: str, what: str) -> int:
        """Return the seed of a parameter's random numbers in this iteration, the same on every machine."""
        return salt_of(self._own.seed, self._own.editor.num_edits, self._iteration[parameter], parameter, what)

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": dict(self._iteration)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._iteration = dict(state["iteration"])
