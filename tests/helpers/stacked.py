"""Layers that are stored like those of transformers, for pruning by data."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Conv1D(nn.Module):
    """A Linear stored (in, out), without a bias."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.weight = nf, nn.Parameter(torch.randn(nx, nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Experts(nn.Module):
    """Three experts; each third of the examples goes to one of them."""

    def __init__(self, *, is_transposed: bool) -> None:
        super().__init__()
        self.num_experts, self.is_transposed = 3, is_transposed
        shapes = [(8, 12), (12, 8)] if is_transposed else [(12, 8), (8, 12)]
        self.up, self.down = (nn.Parameter(torch.randn(3, *shape)) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_transposed:
            return torch.bmm(torch.bmm(x.view(3, -1, 8), self.up).relu(), self.down).reshape(-1, 8)
        parts = x.chunk(3)
        return torch.cat([F.linear(F.linear(p, self.up[i]).relu(), self.down[i]) for i, p in enumerate(parts)])
