"""Rules: what a phase does in each iteration besides the optimizer's step.

A method names a rule with a value (a `Rule`, see growprune.plan). The classes here run them on a model, around each
step of an attached optimizer. To add one: its class, and a line in `RULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.masks.patterns import in_one_go
from growprune.masks.ranking import choose, random_keys, salt_of
from growprune.methods.admm import Admm
from growprune.methods.deepr import Deepr
from growprune.methods.dpf import Dpf
from growprune.methods.str_ import Str
from growprune.plan import Part, Rule, prune
from growprune.sparse.model import SparseModel
from growprune.storage.masked import zero_off


class RunningRule:
    """A rule that runs on a part of a sparse model, which needs masked storage.

    Args:
        why: the reason, for an error.
    """

    by_weight: tuple[str, ...] = ()
    """The entries of its state that have a number for each weight."""
    counts: tuple[str, ...] = ()
    """The entries of its state that have a count for each parameter."""
    empty_at: Mapping[str, str] = MappingProxyType({})
    """By entry: the number of its state that is 0 as long as the entry may be empty, if that is not `iteration`."""
    num_rewirings = 0
    """How often the rule may have changed masks. The masks of replicas are compared after each time."""

    def __init__(self, own: SparseModel, part: Part, why: str) -> None:
        if own.storage != "masked":
            raise GrowpruneError(f"{why}: use storage='masked', not {own.storage!r}")
        self._own = own
        self.weights = own.editor.weights_of(part)
        self.names = tuple(dict.fromkeys(weight.parameter for weight in self.weights))

    def parameter(self, name: str) -> nn.Parameter:
        return self._own.model.get_parameter(name)

    def ours(self, trained: Mapping[str, float]) -> list[str]:
        """Return the part's parameters among those that an optimizer trains."""
        return [name for name in self.names if name in trained]

    def here(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors by parameter name, on the devices of the parameters."""
        return {name: tensor.to(self.parameter(name).device) for name, tensor in saved.items()}

    def check_rates(self, who: str, trained: Mapping[str, float]) -> None:
        """Raise, before anything is changed, if an optimizer has no learning rate for a parameter of the part."""
        if unknown := [name for name in self.ours(trained) if math.isnan(trained[name])]:
            raise GrowpruneError(
                f"{who} needs the learning rate of each step, but the optimizer has no lr for {unknown[0]}: set one "
                f"(for transformers' Adafactor, lr=1e-3 with relative_step=False), or use another optimizer"
            )

    def enter(self) -> None:
        """Called when a phase begins, after its edits. Not called when a phase is resumed; its state is loaded then."""

    def before_step(self, trained: Mapping[str, float], /) -> None:
        """Called before a step, when the gradients of the optimizer's prunable parameters are computed.

        Args:
            trained: their learning rates, by name; NaN if the optimizer has none (see `check_rates`).
        """

    def after_step(self, trained: Mapping[str, float], /) -> None:
        """Called after the step, when pruned weights are exactly zero again."""

    def figures(self) -> dict[str, float]:
        """Return numbers to log. `sparsity` is the fraction of zeros that the rule itself has made."""
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise unless a state has the entries of this rule: tensors by weight, and numbers."""
        for name, own in self.state_dict().items():
            value, shapes = state.get(name), {n: self._own.stored[n].shape for n in self.names}
            if name in self.by_weight:
                shapes = {weight.name: torch.Size() for weight in self.weights}
            if not isinstance(own, Mapping):
                fits = type(value) in (int, float)
            elif not isinstance(value, Mapping) or (
                value.keys() != shapes.keys() and (value or state.get(self.empty_at.get(name, "iteration"), 1) != 0)
            ):
                fits = False
            elif name in self.counts:
                fits = all(type(one) is int for one in value.values())
            else:
                fits = all(isinstance(one, Tensor) and one.shape == shapes.get(key) for key, one in value.items())
            if not fits:
                raise GrowpruneError(
                    f"the state is damaged: the rule of its phase lacks {name}, or has another kind of value there"
                )

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        raise NotImplementedError


class AsideRule(RunningRule):
    """A rule that keeps dense weights w aside, and lets the model compute with weights that are made from them.

    The optimizer steps on the dense weights: before a step they are written into the parameters, in place, so that
    compiled or captured code stays valid; after it they are taken out again.
    """

    def __init__(self, own: SparseModel, part: Part, why: str) -> None:
        super().__init__(own, part, why)
        self.w: dict[str, Tensor] = {}

    @torch.no_grad()
    def enter(self) -> None:
        self.w = {name: self.parameter(name).detach().clone() for name in self.names}

    @torch.no_grad()
    def put_in(self, names: Iterable[str]) -> None:
        """Write the dense weights into the parameters before a step."""
        for name in names:
            self.parameter(name).copy_(self.w[name])

    def take_out(self, names: Iterable[str]) -> None:
        """Take the dense weights out after a step. The model's weights are then computed from them."""
        for name in names:
            self.w[name].copy_(self.parameter(name).detach())

    def state_dict(self) -> dict[str, Any]:
        return {"w": {name: tensor.clone() for name, tensor in self.w.items()}}  # which steps change in place

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.w = {name: tensor.clone() for name, tensor in self.here(state["w"]).items()}


class Iterations:
    """Count iterations by the parameters that are stepped. Several optimizers may step one after the other."""

    def __init__(self, begun: int = 0) -> None:
        self.begun = begun
        self._stepped: set[str] = set()

    def step(self, names: Iterable[str]) -> bool:
        """Record that these are stepped. Return True if that begins an iteration, as when one of them steps again."""
        is_new = not self._stepped or not self._stepped.isdisjoint(names)
        if is_new:
            self.begun, self._stepped = self.begun + 1, set()
        self._stepped.update(names)
        return is_new


class AdmmRule(RunningRule):
    """Add rho (W - Z + U) to the gradients, and update Z and U at regular intervals."""

    def __init__(self, rule: Admm, own: SparseModel) -> None:
        super().__init__(own, rule.part, "ADMM needs all weights dense")
        self.rule = rule
        self._iterations = Iterations()
        self.Z: dict[str, Tensor] = {}  # Z and U are made of the weights as the first step finds them
        self.U: dict[str, Tensor] = {}

    @torch.no_grad()
    def before_step(self, trained: Mapping[str, float]) -> None:
        own, W = self.ours(trained), {name: self.parameter(name) for name in self.names}
        if own and self._iterations.step(own):
            if self._iterations.begun == 1:
                self.U = {name: torch.zeros_like(w) for name, w in W.items()}
                self.Z = self._project(W)
            elif (self._iterations.begun - 1) % self.rule.every == 0:
                self.Z = self._project({name: w + self.U[name] for name, w in W.items()})
                self.U = {name: self.U[name] + w - self.Z[name] for name, w in W.items()}
        for name in own:
            if (gradient := W[name].grad) is not None:
                gradient.add_(W[name] - self.Z[name] + self.U[name], alpha=self.rule.rho)

    def _project(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        masks = self._own.editor.kept(prune(self.rule.part, to=self.rule.to), values)
        return {name: torch.where(masks[name], tensor, 0) for name, tensor in values.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self._iterations.begun, "Z": dict(self.Z), "U": dict(self.U)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._iterations = Iterations(state["iteration"])
        self.Z, self.U = self.here(state["Z"]), self.here(state["U"])


class DeeprRule(RunningRule):
    """Add the L1 gradient before each step; add noise and rewire after it."""

    counts = ("iteration",)

    def __init__(self, rule: Deepr, own: SparseModel) -> None:
        super().__init__(own, rule.part, "DeepR edits masks in every iteration")
        if not own.pattern.is_single:
            raise GrowpruneError(f"DeepR needs pattern='unstructured', as it rewires weights, got {own.pattern.name!r}")
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
            p, temperature = self.parameter(name), self.rule.temperature_at(self._iteration[name])
            generator = torch.Generator(p.device).manual_seed(self._salt(name, "noise") >> 1)
            noise = torch.randn(p.shape, generator=generator, device=p.device, dtype=p.dtype)
            p.add_(noise.mul_(mask), alpha=math.sqrt(2 * trained[name] * temperature))
        before = {name: self._sign.pop(name) for name in masks}  # what was zero is new, and gets its sign now
        died = {name: (sign != 0) & (self.parameter(name).sign() != sign) for name, sign in before.items()}
        weights = [weight for weight in self.weights if weight.parameter in masks]
        counts = in_one_go([torch.count_nonzero(weight.of(died[weight.parameter])) for weight in weights])
        changed = dict.fromkeys(weight.parameter for weight, count in zip(weights, counts, strict=True) if count)
        for name in changed:  # first, so that a revived weight starts from zero
            masks[name].logical_and_(~died[name])
            self._own.editor.set_mask(name, masks[name])
        for weight, count in zip(weights, counts, strict=True):
            if count:  # as many random dead weights
                mask = weight.of(masks[weight.parameter])
                keys = random_keys(0, mask.numel(), self._salt(weight.parameter, weight.name), mask.device)
                keys.mul_(~mask.reshape(-1))
                (chosen,) = choose([lambda keys=keys: iter([keys.clone()])], count, device=keys.device)  # type: ignore[misc]
                mask.logical_or_(torch.cat(list(chosen)).view(mask.shape))
        for name in changed:
            self._own.editor.set_mask(name, masks[name])
        for name in masks:
            self._iteration[name] += 1
        self.num_rewirings += 1

    def _salt(self, parameter: str, what: str) -> int:
        """Return the seed of a parameter's random numbers in this iteration, the same on every machine."""
        return salt_of(self._own.seed, self._own.editor.num_edits, self._iteration[parameter], parameter, what)

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": dict(self._iteration)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._iteration = dict(state["iteration"])


class DpfRule(AsideRule):
    """Use the gradient at m * w for w, and recompute m at regular intervals."""

    empty_at = MappingProxyType({"m": "target"})

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
        super().enter()
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
        return {**place, **super().state_dict(), "m": dict(self.m)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._iterations, self._target = Iterations(state["iteration"]), state["target"]
        self.m = self.here(state["m"])


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
        super().enter()
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
        return {**super().state_dict(), "s": {name: s.clone() for name, s in self.s.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        device = {weight.name: self.w[weight.parameter].device for weight in self.weights}
        self.s = {name: torch.clone(s).to(device[name]) for name, s in state["s"].items()}


RULES: dict[type[Rule], Callable[[Any, SparseModel], RunningRule]] = {
    Admm: AdmmRule,
    Dpf: DpfRule,
    Str: StrRule,
    Deepr: DeeprRule,
}
"""By the type of a rule: the class that runs it on a model. It raises, without changes, if it does not fit."""


def running(rule: Rule, own: SparseModel) -> RunningRule:
    """Return the running rule of a model."""
    if type(rule) not in RULES:
        known = ", ".join(kind.__name__ for kind in RULES)
        raise GrowpruneError(f"{type(rule).__name__} is not a rule that can be run: use one of {known}")
    return RULES[type(rule)](rule, own)
