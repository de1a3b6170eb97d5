"""Storage of sparse parameters during training: one interface, `SparseParameter`, and one file per storage."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from growprune.errors import GrowpruneError
from growprune.masks.bits import pack, unpack
from growprune.masks.patterns import Pattern
from growprune.storage.adapters import check_adapters, forget_masks, keep_masks
from growprune.storage.compact import Compact
from growprune.storage.masked import Masked
from growprune.storage.parameter import SparseParameter

STORAGES: dict[str, type[SparseParameter]] = {"masked": Masked, "compact": Compact}


def store(model: nn.Module, names: Collection[str], storage: str, pattern: Pattern) -> dict[str, SparseParameter]:
    """Store these parameters in a storage. All are checked first, because storing may change the model."""
    if storage not in STORAGES:
        raise GrowpruneError(f"storage must be one of {', '.join(STORAGES)}, got {storage!r}")
    kind = STORAGES[storage]
    kind.check(model, names)
    for name in names:
        parameter = model.get_parameter(name)
        if hasattr(parameter, "__tensor_flatten__") and not hasattr(parameter, "device_mesh"):
            raise GrowpruneError(
                f"{name} is packed in a {type(parameter).__name__}, as quantized weights are, and cannot be masked: "
                f"prune the model first, and quantize it afterwards"
            )
        if (dtype := parameter.dtype).is_floating_point and dtype.itemsize == 1:
            raise GrowpruneError(
                f"{name} has dtype {dtype}, which torch cannot rank, so it cannot be pruned: add it to keep_dense, or "
                f"convert it to torch.bfloat16 first"
            )
    if storage == "compact":
        check_adapters(model, names)
    parameters: dict[str, SparseParameter] = {name: kind(model, name, pattern) for name in names}
    keep_masks(model, parameters)
    return parameters


def make_plain(model: nn.Module, parameters: dict[str, SparseParameter], pattern: Pattern) -> None:
    """Turn stored parameters into plain ones with zeros. Their masks can still be read."""
    masks = {name: pack(parameter.mask()) for name, parameter in parameters.items()}
    for parameter in parameters.values():  # releases everything that its layer holds, so read all masks before
        parameter.release()
    for name, mask in masks.items():
        parameters[name] = plain = Masked(model, name, pattern)
        plain.set_mask(unpack(mask, plain.shape, plain.parameter.device))
    forget_masks(model)


__all__ = ["STORAGES", "Compact", "Masked", "SparseParameter", "make_plain", "store"]
