"""What was measured and chosen, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from growprune.deployment.measure import Row


@dataclass(frozen=True)
class Table(Sequence[Row]):
    """How each layer runs, and why. Print it."""

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
        return {
            "rows": [row.to_dict() for row in self.rows],
            "deployed_ms": self.deployed_ms,
            "torch_ms": self.torch_ms,
            "in_torch": list(self.in_torch),
        }

    def __str__(self) -> str:
        lines = [["layer", "shape", "sparsity", "dense ms", "sparse ms", "choice"]]
        for row in self.rows:
            times = ["-" if ms is None else f"{ms:.3f}" for ms in (row.dense_ms, row.sparse_ms)]
            lines.append([row.layer, row.shape, f"{row.sparsity:.4f}", *times, row.choice])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join([*shown, *self._footer()])

    def _footer(self) -> list[str]:
        footer = []
        if self.deployed_ms is not None and self.torch_ms is not None:
            footer.append(f"the whole model: {self.deployed_ms:.3f} ms, in torch {self.torch_ms:.3f} ms")
        if self.in_torch:
            footer.append(f"in torch: {', '.join(self.in_torch)}")
        return footer
