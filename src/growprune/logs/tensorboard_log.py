"""`tensorboard/`: the numbers of each epoch as scalars, over the iterations of the run.

When rows are removed after a resume, the files are written anew from the run's own log.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from growprune.errors import need
from growprune.logs.rows import Row

NOT_DRAWN = ("iteration", "stage", "branch")


class Writer:
    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._module = need("torch.utils.tensorboard", "tensorboard", "--log tensorboard needs an extra")
        self._open: dict[int | None, Any] = {}
        self._written: list[Row] | None = None
        """The rows that are in the files; None if an earlier process wrote them."""

    def write(self, rows: Sequence[Row]) -> None:
        if self._written is None or self._written != rows[: len(self._written)]:
            self.close()
            for path in self._folder.rglob("events.out.tfevents.*"):
                path.unlink()
            self._written = []
        for row in rows[len(self._written) :]:
            if row.branch not in self._open:
                below = "" if row.branch is None else f"branch-{row.branch}"
                self._open[row.branch] = self._module.SummaryWriter(str(self._folder / below))
            for name, value in row.figures.items():
                if value is not None and name not in NOT_DRAWN:
                    self._open[row.branch].add_scalar(name, value, row.iteration, walltime=row.time)
        self._written = [*rows]
        for writer in self._open.values():
            writer.flush()  # so that a kill loses nothing

    def close(self) -> None:
        for writer in self._open.values():
            writer.close()
        self._open = {}
