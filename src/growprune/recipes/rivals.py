"""The rivals in the paper's tables, as a table: each line is two rows, one at 80 % and one at 90 %.

Their names read `method-sparsity-allocation[-times]`: `rigl-80-uniform-5x` is RigL, five times as long. In small and
tiny studies all of them train for the study's budget, and long forms for so many times that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from growprune.plan import Plan
from growprune.recipes.study import Row

SPARSITIES = (0.8, 0.9)


@dataclass(frozen=True)
class Rival:
    """What a table says of a method."""

    name: str
    method: Callable[..., Plan]
    allocation: str
    epochs: int
    """In all, in the paper."""
    found: tuple[str | None, str | None] = (None, None)
    """What was reached at 80 and 90 %; None where the paper has no such row."""
    times: int = 1
    """How many times as long as its short form."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def rows(self, table: str, metric: str) -> Iterable[tuple[str, Row]]:
        for sparsity, found in zip(SPARSITIES, self.found, strict=True):
            percent, length = f"{sparsity:.0%}".rstrip("%"), "" if self.times == 1 else f"-{self.times}x"
            about = f"{self.name} {self.allocation} {percent} %" + (f", {self.times} times" if length else "")
            claim = (
                f"{about}, which the paper does not have" if found is None else f"{table}, {about}: {metric} {found}"
            )
            yield f"{self.name}-{percent}-{self.allocation}{length}", (claim, self._made_at(sparsity))

    def _made_at(self, sparsity: float) -> Any:
        how = {"allocation": self.allocation, "epochs": self.epochs, "times": self.times}
        return lambda study: study.rival(self.method, sparsity, **how, **self.options)


def rows_of(rivals: Iterable[Rival], *, table: str, metric: str) -> dict[str, Row]:
    """The rows of a table's rivals, by name."""
    return {name: row for rival in rivals for name, row in rival.rows(table, metric)}
