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
from growprune.sparse.rules.base import check_masked


class Aside:
    """The dense weights of a part.

    Args:
        who: the method's name, for an error.
    """

    def __init__(self, own: Internals, part: Part, who: str) -> None:
        check_masked(own, f"{who} needs all weights dense")
        self._model = own.model
        self.weights = own.editor.counts.weights_of(part)
        self.names = tuple(dict.fromkeys(weight.parameter for weight in self.weights))
        self.values: dict[str, Tensor] = {}

    @property
    def parameters(self) -> dict[str, Tensor]:
        """What the model has, by name."""
        return {name: self._model.get_parameter(name).detach() for name in self.names}

    def begin(self) -> None:
        self.values = {name: tensor.clone() for name, tensor in self.parameters.items()}

    def put_in(self, names: Iterable[str]) -> None:
        """Before a step."""
        parameters = self.parameters
        for name in names:
            parameters[name].copy_(self.values[name])

    def take_out(self, names: Iterable[str]) -> None:
        """After a step; the model's own are to be made of them then."""
        parameters = self.parameters
        for name in names:
            self.values[name].copy_(parameters[name])

    def gradient(self, name: str) -> Tensor | None:
        """The gradient that the optimizer will see."""
        return self._model.get_parameter(name).grad

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.values)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        device = {name: tensor.device for name, tensor in self.parameters.items()}
        self.values = {name: torch.clone(tensor).to(device[name]) for name, tensor in state.items()}
