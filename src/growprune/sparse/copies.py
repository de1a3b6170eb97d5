"""Apply the masks of a sparse model to copies of it, such as moving averages."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from growprune.errors import GrowpruneError
from growprune.storage import SparseParameter
from growprune.storage.adapters import stored_in
from growprune.storage.compact_modules import layouts_of


def mask_copy(copy: nn.Module, parameters: Mapping[str, SparseParameter]) -> None:
    """Apply the masks of a model's prunable parameters, given by name, to a copy of the model."""
    inner, dense = _named_alike(copy, parameters), []
    for name, parameter in parameters.items():  # all, before any is changed
        path, _, local = name.rpartition(".")
        layout = layouts_of(inner.get_submodule(path)).get(local)
        shape = inner.get_parameter(name).shape if layout is None else layout.shape
        if shape != parameter.shape:
            raise GrowpruneError(
                f"{name} has shape {tuple(shape)} in the copy, but {tuple(parameter.shape)} in the model: pass a copy "
                f"of the same model"
            )
        if layout is None:
            dense.append((inner.get_submodule(path), local, parameter))
        elif not torch.equal(layout.mask().cpu(), parameter.mask().cpu()):
            raise GrowpruneError(
                f"{name} of the copy is compact and has another mask: copy the model again after edits"
            )
    with torch.no_grad():
        for module, local, parameter in dense:
            target = module.get_parameter(local)
            mask = parameter.mask().to(target.device)
            target.copy_(torch.where(mask, target, 0))
            if (stored := stored_in(module).get(local)) is not None:
                stored.set_mask(mask)  # so that it trains what lives now


def _named_alike(copy: nn.Module, parameters: Mapping[str, SparseParameter]) -> nn.Module:
    """Unwrap a copy until its parameters have the same names as in the model."""
    for inner in (copy, getattr(copy, "module", None), getattr(copy, "_orig_mod", None)):
        if isinstance(inner, nn.Module) and parameters.keys() <= dict(inner.named_parameters()).keys():
            return inner
    missing = next(name for name in parameters if name not in dict(copy.named_parameters()))
    raise GrowpruneError(f"the copy has no parameter {missing}: pass a copy of the same model")
