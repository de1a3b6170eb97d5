"""How each layer of a deployed model runs, and what was measured."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from growprune.deployment.cpu.library import Tile
from growprune.deployment.cuda.products import Tile as GpuTile

MOST_SHOWN, MOST_EACH = 240, 80
"""The characters of a printed table for what stays in torch: in all, and for each."""


@dataclass(frozen=True)
class Row:
    """How a layer runs."""

    layer: str
    shape: str
    """Of its weight, and how many columns (on a GPU, samples) it is multiplied with."""
    sparsity: float
    dense_ms: float | None
    """None where it was not measured."""
    sparse_ms: float | None
    choice: str
    """"sparse", "dense", or "torch": outside of what is deployed."""
    tile: Tile | GpuTile | None = None
    """How the product is cut up, where it runs on our kernels."""
    format: str = ""
    """On a GPU: "offsets", "columns" or "dense"."""


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
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        if self.deployed_ms is not None and self.torch_ms is not None:
            shown.append(f"the whole model: {self.deployed_ms:.3f} ms, in torch {self.torch_ms:.3f} ms")
        if self.in_torch:
            said = ", ".join(textwrap.shorten(one, MOST_EACH, placeholder="...") for one in self.in_torch)
            shown.append(f"in torch: {textwrap.shorten(said, MOST_SHOWN, placeholder=' ... (see table.in_torch)')}")
        return "\n".join(shown)
