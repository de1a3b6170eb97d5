"""What a sparse model holds, copied and put back: tensors and masks, whatever storage they come from and go to.

`parameters` are how the model's prunable parameters are stored, by name. What `SparseModel.state_dict` has beside masks
is in model.py; checkpoints of sharded models are in files/sharded_checkpoints.py.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.masks.bits import Snapshot, check_packed, like, pack, unpack, whole
from growprune.sparse.checks import named_tensors
from growprune.sparse.optimizers import Optimizers
from growprune.storage import SparseParameter

Device = torch.device | str | None
"""Where copies go; each tensor's own device if None."""


def take_snapshot(
    model: nn.Module, parameters: Mapping[str, SparseParameter], names: Container[str] | None, device: Device
) -> Snapshot:
    """A copy of the tensors of these names, or of all, and of their masks; of sparse weights, the live values."""
    return {
        name: _copied(tensor, parameters.get(name), tensor.device if device is None else device)
        for name, tensor in named_tensors(model).items()
        if names is None or name in names
    }


def _copied(
    tensor: Tensor, parameter: SparseParameter | None, device: torch.device | str
) -> tuple[Tensor, Tensor | None]:
    if parameter is None:
        return whole(tensor.detach()).to(device, copy=True), None
    return parameter.to_live(tensor.detach()).to(device, copy=True), pack(parameter.mask()).to(device)


def put_back(
    snapshot: Mapping[str, tuple[Tensor, Tensor | None]],
    model: nn.Module,
    parameters: Mapping[str, SparseParameter],
    optimizers: Optimizers,
    *,
    keep: bool,
) -> None:
    """Put copied tensors and masks back; the state of optimizers follows.

    Args:
        keep: whether compact storage may keep those of sparse weights, instead of copying them once more.
    """
    tensors = named_tensors(model)
    for name, (values, mask) in snapshot.items():
        if mask is None:
            with torch.no_grad():
                tensors[name].copy_(like(tensors[name], values))
        else:
            check_packed(mask, parameters[name].shape)
            with optimizers.following(name) as parameter:
                parameter.load(values, mask, keep=keep)


def packed_masks(parameters: Mapping[str, SparseParameter]) -> dict[str, Tensor]:
    """The masks of all prunable parameters, by name, eight weights to a byte."""
    return {name: pack(parameter.mask()) for name, parameter in parameters.items()}


def set_packed_masks(
    masks: Mapping[str, Tensor], parameters: Mapping[str, SparseParameter], optimizers: Optimizers
) -> None:
    """Take back what `packed_masks` gave; the state of optimizers follows."""
    if unknown := set(masks) ^ set(parameters):
        raise GrowpruneError(
            f"the state's masks and the model's prunable weights differ in {sorted(unknown)}: make the model sparse "
            f"with the keep_dense and include of then"
        )
    for name, parameter in parameters.items():  # all, before any is changed
        check_packed(masks[name], parameter.shape)
    for name, parameter in parameters.items():
        mask = unpack(masks[name], parameter.shape, parameter.parameter.device)
        if not torch.equal(mask, parameter.mask()):
            optimizers.note_other_masks()
        with optimizers.following(name):
            parameter.set_mask(mask)
