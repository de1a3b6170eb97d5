"""Other copies of a sparse model, such as moving averages, which must be as sparse as it is."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from growprune.errors import GrowpruneError
from growprune.storage import SparseParameter
from growprune.storage.compact_modules import layouts_of


def mask_copy(copy: nn.Module, parameters: Mapping[str, SparseParameter]) -> None:
    """Make a copy of a model as sparse as the model is, whose prunable parameters are given by name."""
    inner, dense = _named_alike(copy, parameters), []
    for name, parameter in parameters.items():  # all, before any is changed
        path, _, local = name.rpartition(".")
        layout = layouts_of(inner.get_submodule(path)).get(local)
        shape = inner.get_parameter(name).shape if layout is None else layout.shape
        if shape != parameter.shape:
            raise GrowpruneError(f"{name} of the copy has shape {tuple(shape)}: it is of another model")
        if layout is None:
            dense.append((inner.get_parameter(name), parameter))
        elif not torch.equal(layout.mask().cpu(), parameter.mask().cpu()):
            raise GrowpruneError(f"{name} of the copy is compact with another mask: make it anew after an edit")
    with torch.no_grad():
        for target, parameter in dense:
            target.copy_(torch.where(parameter.mask().to(target.device), target, 0))


def _named_alike(copy: nn.Module, parameters: Mapping[str, SparseParameter]) -> nn.Module:
    """A copy of the model, whatever it is wrapped in, whose parameters have the names that the model has for them."""
    for inner in (copy, getattr(copy, "module", None), getattr(copy, "_orig_mod", None)):
        if isinstance(inner, nn.Module) and parameters.keys() <= dict(inner.named_parameters()).keys():
            return inner
    missing = next(name for name in parameters if name not in dict(copy.named_parameters()))
    raise GrowpruneError(f"the copy lacks {missing}: it is of another model")
