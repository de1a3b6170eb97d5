"""Prepared layers, y = x W^T + bias: siblings that take the place of an `nn.Linear` when decoding.

They hold no parameters, as there is nothing to train; weights are buffers that move with the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.inference.cuda.entries import Entries
from growprune.inference.cuda.products import MOST_SAMPLES, Matrix, Tile, product

FEW_ROUNDS = 4
"""Batches of so many times 16 are taken 16 at a time; larger ones by a dense copy, made for the call."""


class DenseLinear(nn.Module):
    """As torch has it."""

    kind = "dense"
    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class SemiStructuredLinear(DenseLinear):
    """2:4 sparsity through core torch, which needs CUDA, 16-bit weights, and sizes that suit its kernels."""

    kind = "2:4"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(torch.sparse.to_sparse_semi_structured(weight), bias)


class SparseLinear(nn.Module):
    """On our kernels for up to 16 samples, and for a few times as many in rounds.

    Args:
        tiles: how to go about a batch of up to so many samples; the least that is enough is taken.
        dense: a dense copy of the weight, if one may be kept: for batches over 16.
    """

    matrix_values: Tensor
    bias: Tensor | None
    dense: Tensor | None

    def __init__(
        self,
        matrix: Matrix,
        *,
        bias: Tensor | None = None,
        tiles: Mapping[int, Tile] | None = None,
        dense: Tensor | None = None,
        kind: str = "sparse",
    ) -> None:
        super().__init__()
        self.kind, self.tiles = kind, dict(sorted((tiles or {}).items()))
        self._sizes: dict[str, Any] = {f.name: getattr(matrix, f.name) for f in dataclasses.fields(matrix)}
        self._class = type(matrix)
        for name, part in list(self._sizes.items()):
            if isinstance(part, Tensor):
                self.register_buffer(f"matrix_{name}", part)
                del self._sizes[name]
        self.register_buffer("bias", bias)
        self.register_buffer("dense", dense)
        self._matrix: Matrix | None = matrix

    @property
    def matrix(self) -> Matrix:
        """Of the buffers, wherever they are now."""
        if self._matrix is None or self._matrix.values is not self.matrix_values:
            parts: dict[str, Any] = {n.removeprefix("matrix_"): part for n, part in self._buffers.items() if "_" in n}
            self._matrix = self._class(**self._sizes, **parts)
        return self._matrix

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) <= MOST_SAMPLES:
            out = product(self.matrix, flat, self._tile(len(flat)))
        elif self.dense is not None or len(flat) > FEW_ROUNDS * MOST_SAMPLES:
            out = F.linear(flat, self.matrix.dense() if self.dense is None else self.dense)
        else:
            parts = [flat[i : i + MOST_SAMPLES] for i in range(0, len(flat), MOST_SAMPLES)]
            out = torch.cat([product(self.matrix, part, self._tile(len(part))) for part in parts])
        out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], out.shape[-1])

    def _tile(self, batch: int) -> Tile | None:
        return next((tile for most, tile in self.tiles.items() if most >= batch), None)


def semi_structured(entries: Entries, bias: Tensor | None = None) -> SemiStructuredLinear | None:
    """The 2:4 layer of a matrix, if its mask is 2:4 and torch can run it here."""
    values = entries.values
    if not values.is_cuda or values.dtype == torch.float32 or entries.columns % 4:
        return None
    weight = entries.dense()
    if int((weight != 0).view(-1, 4).sum(1).amax()) > 2:
        return None
    try:
        layer = SemiStructuredLinear(weight, bias)
        layer(torch.zeros(1, entries.columns, dtype=values.dtype, device=values.device))
    except (RuntimeError, NotImplementedError, ValueError):  # sizes, or a build of torch without it
        return None
    return layer
