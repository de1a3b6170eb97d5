"""The prunable parameters of a model, stored as asked, and made plain again. Adapters hear of both (adapters.py)."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from growprune.masks.bits import pack, unpack
from growprune.masks.patterns import Pattern
from growprune.storage import SparseParameter, parse_storage
from growprune.storage.adapters import check_adapters, forget_masks, keep_masks


def store(model: nn.Module, names: Collection[str], storage: str, pattern: Pattern) -> dict[str, SparseParameter]:
    """Store the parameters of these names as asked; all are checked first, since storing may change the model."""
    kind = parse_storage(storage)
    for name in names:
        kind.check(model, name)
    check_adapters(model, names if storage == "compact" else ())
    parameters: dict[str, SparseParameter] = {name: kind(model, name, pattern) for name in names}
    keep_masks(model, parameters)
    return parameters


def make_plain(model: nn.Module, parameters: dict[str, SparseParameter], pattern: Pattern) -> None:
    """Make stored parameters plain ones that happen to hold zeros. What lives of them can still be asked."""
    masks = {name: pack(parameter.mask()) for name, parameter in parameters.items()}
    for parameter in parameters.values():  # which lets go of all that its layer holds: of several, none is asked after
        parameter.release()
    for name, mask in masks.items():
        parameters[name] = plain = parse_storage("masked")(model, name, pattern)
        plain.set_mask(unpack(mask, plain.shape, plain.parameter.device))
    forget_masks(model)
