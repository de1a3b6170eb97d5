"""The sparse layer that takes the place of an `nn.Linear` when decoding: y = x W^T + bias.

It has no parameters, because nothing is trained. Its weights are buffers that move with the model.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn
from torch.nn import functional as F

from growprune.deployment.cuda.formats import LaneMatrix
from growprune.deployment.cuda.products import MOST_SAMPLES, Tile, product


class SparseLinear(nn.Module):
    """A linear layer on our kernels for up to 16 samples; for more, with a dense copy that is made for the call.

    Args:
        tile: how programs divide the work for up to `samples` samples; others use the default.
    """

    matrix_values: Tensor
    bias: Tensor | None

    def __init__(
        self,
        matrix: LaneMatrix,
        *,
        bias: Tensor | None = None,
        tile: Tile | None = None,
        samples: int = MOST_SAMPLES,
    ) -> None:
        super().__init__()
        self.tile, self.samples = tile, samples
        self.out_features, self.in_features = matrix.rows, matrix.columns
        for name, part in vars(matrix).items():
            if isinstance(part, Tensor):
                self.register_buffer(f"matrix_{name}", part)
        self.register_buffer("bias", bias)
        self._matrix = matrix

    @property
    def matrix(self) -> LaneMatrix:
        """The matrix of the buffers, wherever they are now."""
        if self._matrix.values is not self.matrix_values:  # moved or converted
            parts = {name[7:]: part for name, part in self._buffers.items() if name.startswith("matrix_")}
            self._matrix = dataclasses.replace(self._matrix, **parts)  # type: ignore[arg-type]
        return self._matrix

    @property
    def weight(self) -> Tensor:
        """The dense weight (rows, columns), made anew each time: for code that looks at it."""
        return self.matrix.dense()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) > MOST_SAMPLES:
            out = F.linear(flat, self.weight)
        else:
            out = product(self.matrix, flat, self.tile if len(flat) <= self.samples else None)
        out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], out.shape[-1])
