"""Models of a few weights, whose gradients and random numbers are computed by hand."""

import torch
from torch import Tensor, nn

from growprune.sparse.model import SparseModel


class Eight(nn.Module):
    """Eight weights, whose loss can be given any gradient."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.in_features = len(values)  # so that its weight is one of a layer
        self.weight = nn.Parameter(torch.tensor([values]))

    def forward(self, gradient: list[float]) -> Tensor:
        return (self.weight * torch.tensor([gradient])).sum()


def still(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that steps and changes nothing."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def pass_one(model: nn.Module, optimizer: torch.optim.Optimizer, gradient: list[float]) -> None:
    optimizer.zero_grad()
    model(gradient).backward()
    optimizer.step()


def alive(sparse: SparseModel) -> list[int]:
    return sparse.masks["weight"].int().flatten().tolist()


def splitmix(position: int, salt: int) -> int:
    """The reference, in plain Python: the upper 30 bits of splitmix64, plus one."""
    full = (1 << 64) - 1
    z = (position * 0x9E3779B97F4A7C15 + salt) & full
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & full
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & full
    return ((z ^ (z >> 31)) >> 34) + 1
