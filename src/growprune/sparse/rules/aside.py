"""Dense weights kept aside, while the model has others made of them, which it is trained and evaluated with.

An optimizer's step is done to the weights aside: before it they are put into the parameters, in place, so that what is
compiled or captured around those stays good; after it they are taken out again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from growprune.plan import Part
from growprune.sparse.internals import Internals
from growprune.sparse.rules.base import RunningRule


class AsideRule(RunningRule):
    """A rule that keeps the dense weights w of its part aside."""

    def __init__(self, own: Internals, part: Part, why: str) -> None:
        super().__init__(own, part, why)
        self.w: dict[str, Tensor] = {}

    def begin(self) -> None:
        self.w = {name: self.parameter(name).detach().clone() for name in self.names}

    @torch.no_grad()
    def put_in(self, names: Iterable[str]) -> None:
        """Before a step."""
        for name in names:
            self.parameter(name).copy_(self.w[name])

    def take_out(self, names: Iterable[str]) -> None:
        """After a step; the model's own are to be made of them then."""
        for name in names:
            self.w[name].copy_(self.parameter(name).detach())

    def load_aside(self, w: Mapping[str, Tensor]) -> None:
        self.w = {name: tensor.clone() for name, tensor in self.here(w).items()}
