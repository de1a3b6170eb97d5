"""The optimizers that train a sparse model: what is pruned stays zero in their state, which follows each edit."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from growprune.errors import GrowpruneError
from growprune.storage import SparseParameter, parse_storage

REPLACED: Any = WeakTensorKeyDictionary()
"""Parameters in whose place there is another since an edit, with how they were held: to train them changes nothing."""


class Optimizers:
    """Those attached to a model, as long as someone else holds them.

    Args:
        held: the model's prunable parameters by name.
        storage: how they are held.
    """

    def __init__(self, sparse_parameter: Mapping[str, SparseParameter], storage: str) -> None:
        self._sparse_parameters, self._storage = sparse_parameter, storage
        self.attached: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def attach(self, optimizer: Optimizer, *, own: Set[int]) -> None:
        """Follow an optimizer, which must train some of the model's own parameters, given by their ids."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(parameter) in own for parameter in parameters):
            raise GrowpruneError("the optimizer has no parameter of the model: make it of model.parameters()")
        for parameter in parameters:
            if parameter in REPLACED:
                raise GrowpruneError(
                    f"the optimizer holds {REPLACED[parameter]} weights as they were before an edit: make it after the "
                    f"edit, or attach it before"
                )
        self._hook_gradients()
        if optimizer not in self.attached:
            optimizer.register_step_post_hook(self._after_step)
            self.attached.add(optimizer)

    def _hook_gradients(self) -> None:
        for sparse_parameter in self._sparse_parameters.values():
            sparse_parameter.hook_gradients()

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        del args, kwargs
        self._hook_gradients()  # of what has been unfrozen since
        self._enforce((optimizer,))

    def enforce(self) -> None:
        """Make weights, and state that is shaped like its parameter, exactly zero off the masks."""
        self._enforce(tuple(self.attached))

    def _enforce(self, optimizers: Iterable[Optimizer]) -> None:
        listed = []
        for sparse_parameter in self._sparse_parameters.values():
            parameter = sparse_parameter.parameter
            states = [o.state[parameter] for o in optimizers if parameter in o.state]
            tensors = [t for state in states for t in state.values() if isinstance(t, Tensor)]
            listed.append((sparse_parameter, [parameter, *(t for t in tensors if t.shape == parameter.shape)]))
        parse_storage(self._storage).enforce(listed)

    @contextmanager
    def following(self, sparse_parameter: SparseParameter) -> Iterator[None]:
        """While a mask changes: if that makes a new parameter, optimizers go on with it and with its state."""
        old = sparse_parameter.parameter
        dense = {
            o: _reshaped(o.state[old], old.shape, sparse_parameter.to_dense) for o in self.attached if old in o.state
        }
        yield
        new = sparse_parameter.parameter
        if new is old:
            return
        REPLACED[old] = self._storage
        for optimizer in self.attached:
            for group in optimizer.param_groups:
                group["params"] = [new if p is old else p for p in group["params"]]
            if optimizer in dense:
                del optimizer.state[old]
                optimizer.state[new] = _reshaped(dense[optimizer], sparse_parameter.shape, sparse_parameter.from_dense)

    def live_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Like `optimizer.state_dict()`, but of state shaped like a sparse weight, only what lives."""
        return self._converted(
            optimizer,
            optimizer.state_dict(),
            lambda sparse_parameter: (sparse_parameter.parameter.shape, sparse_parameter.to_live),
        )

    def load_live_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Take back what `live_state` gave, whatever storage it was taken from."""
        optimizer.load_state_dict(
            self._converted(
                optimizer,
                state,
                lambda sparse_parameter: (
                    (int(torch.count_nonzero(sparse_parameter.mask())),),
                    sparse_parameter.from_live,
                ),
            )
        )

    def _converted(
        self,
        optimizer: Optimizer,
        state: dict[str, Any],
        how: Callable[[SparseParameter], tuple[Sequence[int], Callable[[Tensor], Tensor]]],
    ) -> dict[str, Any]:
        """State whose tensors of a certain shape are converted, parameter by parameter."""
        held_of = {
            id(sparse_parameter.parameter): sparse_parameter for sparse_parameter in self._sparse_parameters.values()
        }
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        converted = {}
        for index, entries in state["state"].items():
            sparse_parameter = held_of.get(id(parameters[index]))
            converted[index] = entries if sparse_parameter is None else _reshaped(entries, *how(sparse_parameter))
        return {**state, "state": converted}


def _reshaped(entries: dict[str, Any], shape: Sequence[int], convert: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The state of one parameter, with the tensors of a shape converted."""
    return {
        name: convert(entry) if isinstance(entry, Tensor) and entry.shape == torch.Size(shape) else entry
        for name, entry in entries.items()
    }
