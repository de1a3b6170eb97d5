"""The columns that a layer reads and writes: the shape of a convolution, a pool or a linear layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from growprune.errors import GrowpruneError

Pair = tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """Shape of a layer from `[channels][batch * height * width]` to `[rows][batch * out_height * out_width]`."""

    channels: int
    batch: int
    height: int
    width: int
    kernel: Pair = (1, 1)
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    """Zeros on either side. A pool ignores these places."""
    dilation: Pair = (1, 1)
    ceil_mode: bool = False
    """True if a pool includes windows that reach beyond the padding at the end."""

    @classmethod
    def linear(cls, features: int, columns: int) -> Geometry:
        """Return the geometry of a product with a matrix of `features` rows and `columns` columns.

        >>> Geometry.linear(512, 64).columns
        64
        """
        return cls(features, 1, 1, columns)

    def __post_init__(self) -> None:
        if min(self.out_size) < 1:
            raise GrowpruneError(f"{self} has no output: its kernel is larger than its input with padding")
        if self.in_columns >= 1 << 31 or self.columns >= 1 << 31:
            raise GrowpruneError(f"{self} has too many columns: give fewer images at once")

    @cached_property
    def is_plain(self) -> bool:
        """True if output column i is computed from input column i, as in a linear layer."""
        return (self.kernel, self.stride, self.padding) == ((1, 1), (1, 1), (0, 0))

    @cached_property
    def out_size(self) -> Pair:
        """Height and width of the output.

        >>> Geometry(64, 1, 112, 112, kernel=(3, 3), stride=(2, 2), padding=(1, 1)).out_size
        (56, 56)
        """
        return self._length(self.height, 0), self._length(self.width, 1)

    @cached_property
    def in_columns(self) -> int:
        return self.batch * self.height * self.width

    @cached_property
    def columns(self) -> int:
        """Number of output columns."""
        return self.batch * self.out_size[0] * self.out_size[1]

    def _length(self, size: int, axis: int) -> int:
        kernel, stride, padding = self.kernel[axis], self.stride[axis], self.padding[axis]
        span = size + 2 * padding - self.dilation[axis] * (kernel - 1) - 1
        if not self.ceil_mode or span < 0:
            return span // stride + 1
        length = -(-span // stride) + 1
        return length - ((length - 1) * stride >= size + padding)  # as in torch, no window begins after the input
