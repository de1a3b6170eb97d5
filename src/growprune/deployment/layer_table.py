"""A table of how each layer of a deployed model runs, with measured times."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from growprune.deployment.cpu.library import Tile
from growprune.deployment.cuda.products import Tile as GpuTile

WIDTH, MOST_ROWS = 80, 24
"""The width of a printed table, and the number of rows above which similar layers share one."""
MOST_SHOWN, MOST_EACH = 240, 80
"""The most characters in a printed table for the parts that stay in torch: in total, and for each part."""


@dataclass(frozen=True)
class Row:
    """How a layer runs."""

    layer: str
    shape: str
    """The shape of the weight, and the number of columns (on a GPU, samples) that it is multiplied with."""
    sparsity: float
    dense_ms: float | None
    """None if it was not measured."""
    sparse_ms: float | None
    choice: str
    """"sparse", "dense", or "torch" for a layer that is not deployed."""
    tile: Tile | GpuTile | None = None
    """How our kernel divides the product; None in torch."""


@dataclass(frozen=True)
class Table(Sequence[Row]):
    """A printable table of how each layer runs, with the measured times."""

    rows: tuple[Row, ...]
    deployed_ms: float | None = None
    """The time of the whole model on the example, or None if it was not measured."""
    torch_ms: float | None = None
    in_torch: tuple[str, ...] = ()
    """Operations and modules that stay in torch."""

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Return text of at most WIDTH columns. In a long table, layers whose names differ in a number share a line."""
        groups: dict[tuple[str, str, str], list[Row]] = {}
        for row in self.rows:
            alike = re.sub(r"\d+", "*", row.layer) if len(self.rows) > MOST_ROWS else row.layer
            groups.setdefault((alike, row.shape, row.choice), []).append(row)
        lines = [["layer", "shape", "sparsity", "dense ms", "sparse ms", "choice"]]
        for (alike, shape, chosen), rows in groups.items():
            shown = []
            for times in ([row.dense_ms for row in rows], [row.sparse_ms for row in rows]):
                known = [ms for ms in times if ms is not None]
                shown.append(f"{sum(known) / len(known):.3f}" if known else "-")
            sparsity = sum(row.sparsity for row in rows) / len(rows)
            count = "" if len(rows) == 1 else f" ({len(rows)} layers)"
            lines.append([f"{alike}{count}", shape, f"{sparsity:.4f}", *shown, chosen])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        widths[0] = min(widths[0], max(20, WIDTH - sum(widths[1:]) - 2 * len(widths[1:])))
        for line in lines:
            line[0] = line[0] if len(line[0]) <= widths[0] else f"...{line[0][3 - widths[0] :]}"
        text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        if self.deployed_ms is not None and self.torch_ms is not None:
            text.append(f"the whole model: {self.deployed_ms:.3f} ms, in torch {self.torch_ms:.3f} ms")
        if self.in_torch:
            said = ", ".join(textwrap.shorten(one, MOST_EACH, placeholder="...") for one in self.in_torch)
            said = textwrap.shorten(said, MOST_SHOWN, placeholder=" ... (see table.in_torch)")
            text += textwrap.wrap(f"in torch: {said}", WIDTH)
        return "\n".join(text)
