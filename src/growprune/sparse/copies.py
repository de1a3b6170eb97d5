"""Other copies of a sparse model, such as moving averages, which must be as sparse as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from growprune.errors import GrowpruneError
from growprune.storage import SparseParameter
from growprune.storage.compact_modules import layouts_of
from growprune.storage.layout import Layout


def mask_copy(copy: nn.Module, parameters: Mapping[str, SparseParameter]) -> None:
    """Make a copy of a model as sparse as the model is, whose prunable parameters are given by name."""
    inner = _named_alike(copy, parameters)
    for name, parameter in parameters.items():  # all, before any is changed
        _check_copy(inner, name, parameter)
    with torch.no_grad():
        for name, parameter in parameters.items():
            target = inner.get_parameter(name) if _layout_in(inner, name) is None else None
            if target is not None:
                target.copy_(torch.where(parameter.mask().to(target.device), target, 0))


def _named_alike(copy: nn.Module, names: Iterable[str]) -> nn.Module:
    """A copy of the model, whatever it is wrapped in, whose parameters have the names that the model has for them."""
    for inner in (copy, getattr(copy, "module", None), getattr(copy, "_orig_mod", None)):
        parameters = dict(inner.named_parameters()) if isinstance(inner, nn.Module) else {}
        if isinstance(inner, nn.Module) and all(name in parameters for name in names):
            return inner
    missing = next(name for name in names if name not in dict(copy.named_parameters()))
    raise GrowpruneError(f"the copy lacks {missing}: it is of another model")


def _layout_in(model: nn.Module, name: str) -> Layout | None:
    """How a copy holds a parameter, if it is compact and not all alive."""
    path, _, local = name.rpartition(".")
    return layouts_of(model.get_submodule(path)).get(local)


def _check_copy(copy: nn.Module, name: str, parameter: SparseParameter) -> None:
    """Raise if a parameter of a copy is not shaped like that of the model, or compact with another mask."""
    layout = _layout_in(copy, name)
    shape = copy.get_parameter(name).shape if layout is None else layout.shape
    if shape != parameter.shape:
        raise GrowpruneError(f"{name} of the copy has shape {tuple(shape)}: it is of another model")
    if layout is not None and not torch.equal(layout.mask().cpu(), parameter.mask().cpu()):
        raise GrowpruneError(f"{name} of the copy is compact with another mask: make it anew after an edit")
