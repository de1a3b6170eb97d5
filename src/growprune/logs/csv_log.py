"""`metrics.csv`: one row per epoch with all digits, one column per number. Missing numbers are empty cells."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from growprune.files.atomic import replacing
from growprune.logs.rows import Row


class Writer:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "metrics.csv"
        self._columns: list[str] = []
        self._rows: list[Row] = []

    def rewrite(self, rows: Iterable[Row]) -> None:
        self._rows = [*rows]
        self._columns = [*dict.fromkeys(name for row in self._rows for name in row.figures)]
        with replacing(self._path) as file:
            file.write(_lines([self._columns, *map(self._cells, self._rows)]))

    def append(self, row: Row) -> None:
        if not {*row.figures} <= {*self._columns}:  # the first epoch that was validated, or that has a rule
            self.rewrite([*self._rows, row])
            return
        self._rows.append(row)
        with self._path.open("ab") as file:
            file.write(_lines([self._cells(row)]))

    def _cells(self, row: Row) -> list[float | None]:
        return [row.figures.get(name) for name in self._columns]

    def close(self) -> None:
        """Every row is in the file already."""


def _lines(rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
