"""The base class of running rules, called around each step of an attached optimizer while a phase has a rule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.plan import Part
from growprune.sparse.model import SparseModel


class RunningRule:
    """A rule that runs on a part of a sparse model, which needs masked storage.

    Args:
        why: the reason, for an error.
    """

    by_weight: tuple[str, ...] = ()
    """The entries of its state that have a number for each weight."""
    counts: tuple[str, ...] = ()
    """The entries of its state that have a count for each parameter."""
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
        wanted, scalar = self.state_dict(), [weight.name for weight in self.weights]
        wrong = [name for name in wanted if name not in state]
        for name in wanted if not wrong else ():
            value = state[name]
            if not isinstance(wanted[name], Mapping):
                wrong += [name] * (type(value) is bool or not isinstance(value, int | float))
                continue
            is_begun = state.get("iteration", 1) != 0  # before the first iteration there may be none
            names = scalar if name in self.by_weight else self.names
            if not isinstance(value, Mapping) or (is_begun and set(value) != set(names)):
                wrong.append(name)
                continue
            shapes = {n: self._own.stored[n].shape for n in self.names}
            for key, one in value.items():
                fits = isinstance(one, int) if name in self.counts else isinstance(one, Tensor)
                if not fits or (
                    isinstance(one, Tensor) and one.shape != (torch.Size() if name in self.by_weight else shapes[key])
                ):
                    wrong.append(f"{name}[{key!r}]")
        if wrong:
            raise GrowpruneError(
                f"the state is damaged: the rule of its phase lacks {wrong[0]}, or has another kind of value there"
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

    def begin(self) -> None:
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

    def saved(self) -> dict[str, Tensor]:
        """Return copies of the dense weights, which steps change in place."""
        return {name: tensor.clone() for name, tensor in self.w.items()}

    def load_aside(self, w: Mapping[str, Tensor]) -> None:
        self.w = {name: tensor.clone() for name, tensor in self.here(w).items()}


class Iterations:
    """Count iterations by the parameters that are stepped. Several optimizers may step one after the other."""

    def __init__(self) -> None:
        self.begun = 0
        self._stepped: set[str] = set()

    def step(self, names: Iterable[str]) -> bool:
        """Record that these are stepped. Return True if that begins an iteration, as when one of them steps again."""
        names = set(names)
        is_new = not self._stepped or not self._stepped.isdisjoint(names)
        if is_new:
            self.begun, self._stepped = self.begun + 1, set()
        self._stepped |= names
        return is_new

    def resume(self, begun: int) -> None:
        self.begun, self._stepped = begun, set()
