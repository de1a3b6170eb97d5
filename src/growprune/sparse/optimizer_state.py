"""Convert the state of an optimizer: to live weights only, for checkpoints, or to another dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from growprune.masks.bits import like, whole
from growprune.storage import SparseParameter
from growprune.storage.wrapped import is_wrapped, plain


def live_state(
    stored: Mapping[str, SparseParameter], optimizer: Optimizer, device: torch.device | str | None
) -> dict[str, Any]:
    """Return `optimizer.state_dict()` with the state of live weights only.

    Quantized state is kept whole, because converting it back would round it again.

    Args:
        device: the device of state with the shape of a parameter; by default it stays where it is.
    """

    def take(one: SparseParameter | None, parameter: Tensor, entry: Tensor) -> Tensor:
        if entry.shape != parameter.shape:
            return entry
        if one is None:
            entry = whole(entry)
        elif not is_wrapped(entry):
            entry = one.to_live(entry)
        return entry if device is None else entry.to(device)

    return _converted(stored, optimizer, optimizer.state_dict(), take)


def load_live_state(stored: Mapping[str, SparseParameter], optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load what `live_state` returned, from any storage."""

    def put(one: SparseParameter | None, parameter: Tensor, entry: Tensor) -> Tensor:
        if one is None:
            return like(parameter, entry) if entry.shape == parameter.shape else entry
        if is_wrapped(entry):
            if entry.shape == parameter.shape:
                return entry
            if entry.shape == one.shape:  # of masked storage, but this is compact
                return one.from_dense(plain(entry).to(parameter.device))
        return one.from_live(plain(entry)) if entry.shape == (one.num_alive(),) else entry

    optimizer.load_state_dict(_converted(stored, optimizer, state, put))


def _converted(
    stored: Mapping[str, SparseParameter],
    optimizer: Optimizer,
    state: dict[str, Any],
    convert: Callable[[SparseParameter | None, Tensor, Tensor], Tensor],
) -> dict[str, Any]:
    """Convert the tensors of a state, given how their parameter is stored (if sparse), and the parameter."""
    of_id = {id(one.parameter): one for one in stored.values()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    converted = {}
    for index, entries in state["state"].items():
        parameter = parameters[index]
        one = of_id.get(id(parameter))
        converted[index] = {
            name: convert(one, parameter, entry) if isinstance(entry, Tensor) else entry
            for name, entry in entries.items()
        }
    return {**state, "state": converted}


def cast(optimizer: Optimizer, old: torch.dtype) -> None:
    """Convert state in the old dtype of its parameter to the new one, as `load_state_dict` would."""
    for parameter, entries in optimizer.state.items():
        for name, entry in entries.items():
            if isinstance(entry, Tensor) and entry.shape == parameter.shape and entry.dtype == old:
                entries[name] = entry.to(parameter.dtype)


def reshaped(entries: dict[str, Any], shape: Sequence[int], convert: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Convert those tensors of a parameter's state that have a given shape. Quantized ones become plain."""
    return {
        name: convert(entry if type(entry) is Tensor else plain(entry))
        if isinstance(entry, Tensor) and entry.shape == torch.Size(shape)
        else entry
        for name, entry in entries.items()
    }


def follows(optimizer: Optimizer, entries: dict[str, Any], old: Tensor) -> bool:
    """True if state can move to a parameter of another shape: not if it belongs to rows and columns."""
    tensors = [entry for entry in entries.values() if isinstance(entry, Tensor) and entry.numel() > 1]
    return "adafactor" not in type(optimizer).__name__.lower() and all(t.shape == old.shape for t in tensors)
