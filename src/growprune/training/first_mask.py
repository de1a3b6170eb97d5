"""initial_mask="auto": choose the first mask of a plan by inspecting the model.

A new model gets a random mask. A trained model keeps its largest weights. A sparse model keeps its zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from growprune.masks.layers import Weight
from growprune.plan import InitialMask
from growprune.sparse.optimizers import unwrapped

BY_DATA = ("wanda", "sparsegpt")
"""First masks that need calibration data: `prune_pretrained` makes them, and the plan keeps them."""
MASKS: tuple[str, ...] = (*get_args(InitialMask), *BY_DATA)


@dataclass(frozen=True)
class FirstMask:
    """How the first mask is chosen."""

    initial_mask: str | None
    """None if the method chooses it itself."""
    found: float | None = None
    """The sparsity of a model that is already sparse."""


def signs_of_training(
    model: nn.Module, weights: Sequence[Weight], optimizers: Sequence[torch.optim.Optimizer]
) -> str | None:
    """Return why a model looks trained; None if it does not.

    Args:
        weights: the prunable weights. Others, such as a head tied to an embedding, may be initialised otherwise.
    """
    if any(unwrapped(optimizer).state for optimizer in optimizers):
        return "its optimizer has state"
    for module in model.modules():
        if getattr(getattr(module, "config", None), "_name_or_path", None):
            return "loaded by from_pretrained"
        if "Norm" in type(module).__name__ and any(map(_has_moved, module.parameters(recurse=False))):
            return "its norms differ from their initial values"
        if _has_moved(getattr(module, "running_mean", None)):
            return "its BatchNorm statistics have changed"
    has_norms = any("Norm" in type(module).__name__ for module in model.modules())
    modules = [model.get_submodule(weight.parameter.rpartition(".")[0]) for weight in weights]
    is_larger = not has_norms and any(map(_exceeds_initialisation, modules))
    return "its weights are larger than torch initialises them" if is_larger else None


def _exceeds_initialisation(module: nn.Module) -> bool:
    """True if a layer has a weight above the bound of torch's own initialisation, 1 / sqrt(fan_in)."""
    weight = module.weight if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) else None
    if weight is None or weight.is_meta or not weight.numel() or hasattr(weight, "device_mesh"):
        return False
    bound = (weight.numel() / weight.shape[0]) ** -0.5
    return bool(weight.detach().abs().max() > 1.001 * bound)


def _has_moved(tensor: Tensor | None) -> bool:
    """True if a tensor is no longer constant, as the weights and biases of norms initially are."""
    if tensor is None or tensor.is_meta or tensor.ndim != 1 or not len(tensor):
        return False
    local = tensor.detach()
    return bool((local != local[0]).any())
