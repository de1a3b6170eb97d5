"""initial_mask="auto": choose the first mask of a plan by inspecting the model.

A new model gets a random mask. A trained model keeps its largest weights. A sparse model keeps its zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from growprune.masks.layers import Weight, is_norm
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
        if is_norm(module) and any(map(_has_moved, module.parameters(recurse=False))):
            return "its norms differ from their initial values"
        if _has_moved(getattr(module, "running_mean", None)):
            return "its BatchNorm statistics have changed"
    if any(map(is_norm, model.modules())):
        return None
    modules = [model.get_submodule(weight.parameter.rpartition(".")[0]) for weight in weights]
    return "its weights do not look like initial weights" if any(map(_is_moved_layer, modules)) else None


def _is_moved_layer(module: nn.Module) -> bool:
    """True if a layer's weights are neither torch's initial ones nor independent uniform or normal numbers.

    Training changes the shape of the distribution, and adds directions that stand out: a random matrix has a spectral
    norm of at most about std * (sqrt(rows) + sqrt(columns)), and hardly ever std * 2 more.
    """
    weight = module.weight if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) else None
    if weight is None or weight.is_meta or weight.numel() < 2 or hasattr(weight, "device_mesh"):
        return False
    matrix = weight.detach().flatten(1).float()
    largest, size = float(matrix.abs().max()), matrix.numel()
    bound = 1.001 * matrix.shape[1] ** -0.5  # torch's own: uniform within 1 / sqrt(fan_in)
    if largest <= bound:
        return False
    bias: Any = module.bias
    if _has_moved(bias) and bool(bias.detach().abs().max() > bound):
        return True
    std = float(matrix.square().mean().sqrt())
    kurtosis = float((matrix / std).pow(4).mean())  # 1.8 if uniform, 3 if normal
    is_uniform = largest <= std * 3**0.5 * (1 + 1.5 * size**-0.5)
    is_normal = kurtosis >= min(2.3, 3 - 3 * (24 / size) ** 0.5)
    vector = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(0)).to(matrix.device)
    for _ in range(10):
        vector = nn.functional.normalize(matrix.T @ (matrix @ vector), dim=0)
    spectral = float((matrix @ vector).norm())
    return not (is_uniform or is_normal) or spectral > std * (sum(n**0.5 for n in matrix.shape) + 2)


def _has_moved(tensor: Tensor | None) -> bool:
    """True if a tensor is no longer constant, as the weights and biases of norms initially are."""
    if tensor is None or tensor.is_meta or tensor.ndim != 1 or not len(tensor):
        return False
    local = tensor.detach()
    return bool((local != local[0]).any())
