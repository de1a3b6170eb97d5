"""Prepared layers, y = x W^T + bias: siblings that take the place of an `nn.Linear` when decoding.

They hold no parameters, as there is nothing to train; weights are buffers that move with the model.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.deployment.cuda.formats import Entries
from growprune.deployment.cuda.products import MOST_SAMPLES, Matrix, Tile, product

FEW_ROUNDS = 4
"""Batches of up to this many times 16 are computed 16 at a time; larger ones with a dense copy, made for the call."""


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

    def dense_weight(self) -> Tensor:
        """(rows, columns)"""
        return self.weight


class SemiStructuredLinear(DenseLinear):
    """2:4 sparsity through core torch, which needs CUDA, 16-bit weights, and sizes that suit its kernels."""

    kind = "2:4"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it is a prototype
            packed = torch.sparse.to_sparse_semi_structured(weight)
        super().__init__(packed, bias)
        self.out_features, self.in_features = weight.shape

    def dense_weight(self) -> Tensor:
        """(rows, columns), from what the kernels give for one input after the other."""
        eye = torch.eye(self.in_features, dtype=self.weight.dtype, device=self.weight.device)
        parts = [F.linear(eye[i : i + 1024], self.weight) for i in range(0, len(eye), 1024)]
        return torch.cat(parts).t().contiguous()


class SparseLinear(nn.Module):
    """On our kernels for up to 16 samples, and for a few times as many in rounds.

    Args:
        tiles: by the largest batch it is for, how programs divide the work; the least that is enough is taken.
    """

    matrix_values: Tensor
    bias: Tensor | None

    def __init__(
        self,
        matrix: Matrix,
        *,
        bias: Tensor | None = None,
        tiles: Mapping[int, Tile] | None = None,
        kind: str = "sparse",
    ) -> None:
        super().__init__()
        self.kind, self.tiles = kind, dict(sorted((tiles or {}).items()))
        self.hold(matrix)
        self.register_buffer("bias", bias)
        self.out_features, self.in_features = matrix.rows, matrix.columns
        self.together: Callable[[SparseLinear, Tensor], Tensor | None] | None = None
        """What it gives if it is computed with others, see fusing.py; None of an input that it must compute alone."""

    def hold(self, matrix: Matrix) -> None:
        """Take over a matrix: its tensors become buffers."""
        parts = {field.name: getattr(matrix, field.name) for field in dataclasses.fields(matrix)}
        for name, part in parts.items():
            if isinstance(part, Tensor):
                self.register_buffer(f"matrix_{name}", part)
        self._sizes: dict[str, Any] = {name: part for name, part in parts.items() if not isinstance(part, Tensor)}
        self._class = type(matrix)
        self._matrix: Matrix | None = matrix

    @property
    def weight(self) -> Tensor:
        """The dense weight, made anew each time: for code that looks at it."""
        return self.dense_weight()

    def dense_weight(self) -> Tensor:
        """(rows, columns)"""
        return self.matrix.dense()

    @property
    def matrix(self) -> Matrix:
        """Of the buffers, wherever they are now."""
        if self._matrix is None or self._matrix.values is not self.matrix_values:
            parts: dict[str, Any] = {n.removeprefix("matrix_"): part for n, part in self._buffers.items() if "_" in n}
            is_int8 = "scales" in parts
            dtype = self._sizes["dtype"] if is_int8 else self.matrix_values.dtype  # which may have been converted
            self._matrix = self._class(**self._sizes | {"dtype": dtype}, **parts)
        return self._matrix

    def forward(self, x: Tensor) -> Tensor:
        found = None if self.together is None else self.together(self, x)
        return self._alone(x) if found is None else found

    def _alone(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) <= MOST_SAMPLES:
            out = product(self.matrix, flat, self._tile(len(flat)))
        elif len(flat) > FEW_ROUNDS * MOST_SAMPLES:
            out = F.linear(flat, self.matrix.dense())
        else:
            parts = [flat[i : i + MOST_SAMPLES] for i in range(0, len(flat), MOST_SAMPLES)]
            out = torch.cat([product(self.matrix, part, self._tile(len(part))) for part in parts])
        out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], out.shape[-1])

    def _tile(self, batch: int) -> Tile | None:
        return next((tile for most, tile in self.tiles.items() if most >= batch), None)


SUITABLE_ROWS, SUITABLE_COLUMNS = 32, 64
"""Of what the sizes of a 2:4 matrix in 16 bits must be multiples, for either of torch's kernels."""


def semi_structured(entries: Entries, bias: Tensor | None = None) -> SemiStructuredLinear | None:
    """The 2:4 layer of a matrix; None if its mask, type or sizes do not suit. Raises what torch raises."""
    values = entries.values
    if not values.is_cuda or entries.dtype == torch.float32:
        return None
    if entries.rows % SUITABLE_ROWS or entries.columns % SUITABLE_COLUMNS or not is_two_of_four(entries):
        return None
    return SemiStructuredLinear(entries.dense(), bias)


def is_two_of_four(entries: Entries) -> bool:
    """Whether of four neighbours in a row at most two live."""
    if entries.columns % 4 or not entries.values.numel():
        return False
    row = torch.repeat_interleave(torch.arange(entries.rows, device=entries.starts.device), entries.lengths)
    groups = row * (entries.columns // 4) + entries.places // 4
    return bool((groups[2:] > groups[:-2]).all())  # they come in order: of any three, the last is in a later group
