"""How each layer of a deployed model runs, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from growprune.deployment.cpu.library import Tile
from growprune.deployment.cuda.products import Tile as GpuTile


@dataclass(frozen=True)
class Row:
    """How a layer runs."""

    layer: str
    shape: str
    """Of its weight, and how many columns it is multiplied with."""
    sparsity: float
    dense_ms: float | None
    """None where it was not measured."""
    sparse_ms: float | None
    choice: str
    """"sparse", "dense", or "torch": outside of what is deployed."""
    tile: Tile | None = None
    """How the product is cut up, where it runs on our kernels."""


@dataclass(frozen=True)
class GpuRow(Row):
    """How a layer runs on a GPU. Its choice may also be "2:4", or "fused": sparse, as one with others."""

    format: str = ""
    """"offsets", "columns", "bitmask", "2:4" or "dense"."""
    tiles: Mapping[int, GpuTile] = field(default_factory=dict)
    """By the largest batch it is for, how programs divide the work."""
    error: float | None = None
    """What rounding the weights to int8 changed, relative to their norm; None if they are as they were."""


@dataclass(frozen=True)
class Table(Sequence[Row]):
    """A printable table of how each layer runs, with the measured times."""

    rows: tuple[Row, ...]
    deployed_ms: float | None = None
    """The whole model on the example; None if it was not measured."""
    torch_ms: float | None = None
    in_torch: tuple[str, ...] = ()
    """Operations and modules that stay in torch."""

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [["layer", "shape", "sparsity", "dense ms", "sparse ms", "choice"]]
        for row in self.rows:
            times = ["-" if ms is None else f"{ms:.3f}" for ms in (row.dense_ms, row.sparse_ms)]
            lines.append([row.layer, row.shape, f"{row.sparsity:.4f}", *times, row.choice])
        errors = [getattr(row, "error", None) for row in self.rows]
        if any(error is not None for error in errors):
            shown_errors = ["" if error is None else f"{error:.2%}" for error in errors]
            lines = [[*line, error] for line, error in zip(lines, ["int8 error", *shown_errors], strict=True)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        if self.deployed_ms is not None and self.torch_ms is not None:
            shown.append(f"the whole model: {self.deployed_ms:.3f} ms, in torch {self.torch_ms:.3f} ms")
        if self.in_torch:
            shown.append(f"in torch: {', '.join(self.in_torch)}")
        return "\n".join(shown)
