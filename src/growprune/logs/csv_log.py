"""`metrics.csv`: one row per epoch with all digits, one column per number. Missing numbers are empty cells."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from growprune.files.disk import replacing
from growprune.logs.rows import Row


class Writer:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "metrics.csv"

    def write(self, rows: Sequence[Row]) -> None:
        columns = [*dict.fromkeys(name for row in rows for name in row.figures)]
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row.figures for row in rows)
        with replacing(self._path) as file:
            file.write(text.getvalue().encode())

    def close(self) -> None:
        """Every row is in the file already."""
