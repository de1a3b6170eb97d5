"""Keep dense weights aside while the model trains and evaluates with weights that are computed from them.

The optimizer steps on the dense weights: before a step they are written into the parameters, in place, so that compiled
or captured code stays valid; after it they are taken out again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from growprune.plan import Part
from growprune.sparse.model import SparseModel
from growprune.sparse.rules.base import RunningRule


class AsideRule(RunningRule):
    """A rule that keeps the dense weights w of its part aside."""

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

    def load_aside(self, w: Mapping[str, Tensor]) -> None:
        self.w = {name: tensor.clone() for name, tensor in self.here(w).items()}
