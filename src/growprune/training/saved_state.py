"""Check a saved state of a Sparsifier completely, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from growprune.errors import GrowpruneError
from growprune.files.json_file import NUMBER, Names, fault
from growprune.masks.bits import Snapshot, check_packed, unpack
from growprune.plan.settings import check_state
from growprune.sparse.checks import check_settings as check_decisive
from growprune.sparse.checks import named_tensors
from growprune.sparse.model import SparseModel
from growprune.sparse.stepper import KEEPS_ZEROS
from growprune.storage.wrapped import is_wrapped

VERSION = 1
"""Of the format of a state."""

_PLACE: Names = {
    "version": int,
    "settings": dict,
    "num_iterations": int,
    "lengths": (list, tuple),
    "lengths.*": (int, type(None)),
    "first": (list, tuple),
    "first.*": (str, *NUMBER, type(None)),
    "sparse.masks": dict,
    "sparse.masks.*": Tensor,
    "sparse.num_edits": int,
    "sparse.settings": dict,
    "sparse.settings.*": (*NUMBER, str, dict),
    "sparse.gradients.sums": dict,
    "sparse.gradients.sums.*": Tensor,
    "sparse.gradients.averages": dict,
    "sparse.gradients.averages.*": Tensor,
    "sparse.gradients.is_over": bool,
    "sparse.gradients.is_hessian": bool,
    "cursor.position": int,
    "cursor.trail": str,
    "cursor.is_over": bool,
    "cursor.iteration": int,
    "cursor.start": int,
    "cursor.is_counting": bool,
    "cursor.num_steps_after": int,
    "cursor.rule": dict,
}
_MORE: Names = {
    "weights": dict,
    "weights.*": tuple,
    "weights.*.*": (Tensor, type(None)),
    "extra": dict,
    "optimizer_classes": list,
    "optimizers": list,
    "optimizers.*.state": dict,
    "optimizers.*.state.*": dict,
    "optimizers.*.param_groups": list,
    "optimizers.*.param_groups.*.params": list,
}
"""What only a whole state has, not one of `only_masks`."""


def check_contents(state: Mapping[str, Any]) -> None:
    """Raise unless a state has all that the state of a Sparsifier has."""
    check_state(state, "version", "settings", "first", "lengths", "sparse", "cursor")
    if state["version"] != VERSION:
        raise GrowpruneError(
            f"the state has version {state['version']!r}, but this growprune reads version {VERSION}: load it with the "
            f"growprune that wrote it"
        )
    is_whole = not state.keys().isdisjoint(name.partition(".")[0] for name in _MORE)
    wrong = fault(dict(state), {**_PLACE, **(_MORE if is_whole else {})})
    for name in ("first", "lengths") if not wrong else ():
        wrong = wrong or ("" if len(state[name]) == 2 else f"its {name} is {state[name]!r}")
    if wrong:
        raise GrowpruneError(
            f"the state is damaged, or not that of a Sparsifier ({wrong}): pass one that state_dict() of this version "
            f"returned"
        )


def check_settings(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raise unless a state was saved with the settings of this Sparsifier; another storage is allowed."""
    check_state(saved, *mine)
    for name in mine:
        if saved[name] != mine[name] and name != "storage":
            raise GrowpruneError(
                f"the state was saved with {name}={saved[name]!r}, but this Sparsifier has {name}={mine[name]!r}: "
                f"resume with {name}={saved[name]!r}"
            )


def check_masks(saved: Mapping[str, Any], own: SparseModel) -> None:
    """Raise unless masks and gradients have the names and sizes of the model's prunable weights."""
    check_decisive(saved["settings"], own.decisive)
    own.check_packed_masks(saved["masks"])
    for sums in (saved["gradients"]["sums"], saved["gradients"]["averages"]):
        for name, total in sums.items():
            if name not in own.stored or total.numel() != own.stored[name].shape.numel():
                raise GrowpruneError(f"the state belongs to another model: its gradients of {name!r} do not fit")


def check_weights(saved: Snapshot, own: SparseModel) -> None:
    """Raise unless the model has the same tensors, and there is a value for each live weight."""
    tensors = named_tensors(own.model)
    found = [f"only one of the two has {name!r}" for name in sorted(tensors.keys() ^ saved.keys())]
    for name in () if found else tensors:
        pair, stored = saved[name], own.stored.get(name)
        values, mask = pair if len(pair) == 2 else (None, None)
        if values is None or (mask is None) != (stored is None):
            found.append(f"{name} is prunable in only one of the two")
        elif mask is None or stored is None:
            shape = tuple(tensors[name].shape)
            found += [f"{name} has shape {tuple(values.shape)} in it, but {shape} here"] * (values.shape != shape)
        else:
            check_packed(mask, stored.shape)
            alive = int(unpack(mask, stored.shape).sum())
            found += [f"{name} has {values.numel()} values in it for {alive} live weights"] * (values.numel() != alive)
    if found:
        raise GrowpruneError(f"the state belongs to another model: {found[0]}. Build the model that was saved")


def check_optimizers(state: Mapping[str, Any], optimizers: Sequence[Optimizer], own: SparseModel) -> None:
    """Raise unless the saved optimizers are of the same classes, with the same groups, and entries that fit."""
    saved, classes, mine = state["optimizers"], state["optimizer_classes"], [type(o).__name__ for o in optimizers]
    if len(saved) != len(mine):
        raise GrowpruneError(
            f"the state has {len(saved)} optimizers, but this Sparsifier has {len(mine)}: resume with as many as when "
            f"it was saved"
        )
    if classes != mine:
        raise GrowpruneError(
            f"the state was saved with the optimizers {classes}, but this Sparsifier has {mine}: resume with the same "
            f"optimizers, or save with state_dict(only_masks=True) to change them"
        )
    for one, optimizer in zip(saved, optimizers, strict=True):
        sizes, here = ([len(g["params"]) for g in groups] for groups in (one["param_groups"], optimizer.param_groups))
        if sizes != here or not all(index in range(sum(here)) for index in one["state"]):
            raise GrowpruneError(
                f"the state has {type(optimizer).__name__} groups of {sizes} parameters, but the optimizer has {here}: "
                f"create it as when the state was saved"
            )
        if type(optimizer) not in KEEPS_ZEROS:
            continue  # its state may have any form
        alive = {
            id(stored.parameter): int(unpack(state["sparse"]["masks"][name], stored.shape).sum())
            for name, stored in own.stored.items()
        }
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        names = _entries_of(optimizer)
        for index, entries in one["state"].items():
            parameter = parameters[index]
            fitting = (parameter.shape, torch.Size([alive.get(id(parameter), parameter.numel())]), torch.Size())
            for name in names:
                entry = entries.get(name, "missing")
                if not (entry is None or (isinstance(entry, Tensor) and (entry.shape in fitting or is_wrapped(entry)))):
                    raise GrowpruneError(
                        f"the state is damaged: {name} of parameter {index} in {type(optimizer).__name__} is "
                        f"{tuple(entry.shape) if isinstance(entry, Tensor) else entry!r}, for a parameter of shape "
                        f"{tuple(parameter.shape)}"
                    )


def _entries_of(optimizer: Optimizer) -> list[str]:
    """Return the names of what one of torch's optimizers keeps for a parameter: those of a step that was made."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    group = {name: value for name, value in optimizer.param_groups[0].items() if name not in ("params", "lr")}
    plain = {name: False if name in ("fused", "foreach", "capturable") else value for name, value in group.items()}
    probe = type(optimizer)([{**plain, "params": [parameter], "lr": 0.1}], lr=0.1)  # type: ignore[call-arg]
    probe.step()
    return list(probe.state[parameter])
