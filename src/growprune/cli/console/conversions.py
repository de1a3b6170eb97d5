"""What a conversion has read and written."""

from __future__ import annotations

import math

from rich.table import Table

from growprune.cli.console.screen import err, out, print_json, size
from growprune.files.convert import Converted

MAX_ROWS = 40


def show_conversion(done: Converted, *, as_json: bool = False) -> None:
    """Sizes before and after, and the sparse matrices."""
    if as_json:
        return print_json(_content(done))
    out.print(_sizes(done))
    if done.matrices:
        out.print(_matrices(done))
    for note in done.notes:
        err.print(f"growprune: {note}", soft_wrap=True, highlight=False)
    return None


def _content(done: Converted) -> dict[str, object]:
    return {
        "source": {"path": str(done.source), "format": done.format, "bytes": done.source_bytes},
        "dest": {"path": str(done.dest), "format": done.to, "bytes": done.dest_bytes},
        "dense_bytes": done.dense_bytes,
        "sparsity": done.sparsity,
        "matrices": {m.name: {"shape": list(m.shape), "alive": m.alive} for m in done.matrices},
        "notes": list(done.notes),
    }


def _sizes(done: Converted) -> Table:
    table = Table()
    table.add_column("")
    table.add_column("file", overflow="fold", min_width=12)
    table.add_column("format", no_wrap=True)
    for name in ("size", "of dense"):
        table.add_column(name, no_wrap=True, justify="right")
    rows = (("from", done.source, done.format, done.source_bytes), ("to", done.dest, done.to, done.dest_bytes))
    for word, path, format, num_bytes in rows:
        share = f"{num_bytes / done.dense_bytes:.2f}x" if done.dense_bytes else ""
        table.add_row(word, str(path), format, size(num_bytes), share)
    return table


def _matrices(done: Converted) -> Table:
    """A row a sparse matrix, up to a screenful, and one for all."""
    table = Table()
    table.add_column("sparse matrix", overflow="fold", min_width=12)
    for name in ("shape", "live", "sparsity"):
        table.add_column(name, no_wrap=True, justify="right")
    for matrix in done.matrices[:MAX_ROWS]:
        share = 1 - matrix.alive / math.prod(matrix.shape)
        table.add_row(matrix.name, "x".join(map(str, matrix.shape)), f"{matrix.alive:,}", f"{share:.4f}")
    if more := len(done.matrices) - MAX_ROWS if len(done.matrices) > MAX_ROWS else 0:
        table.add_row(f"{more} more", "", "", "")
    table.add_section()
    alive = sum(matrix.alive for matrix in done.matrices)
    table.add_row("all of them", "", f"{alive:,}", f"{done.sparsity:.4f}")
    return table
