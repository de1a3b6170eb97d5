"""Consoles, tables and number formats of the command line."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def out() -> Console:
    """Console for stdout. Made anew each time, because width and rank are not known at import."""
    return Console(quiet=not _is_first(), markup=False, emoji=False)  # strings are shown as they are


def err() -> Console:
    """Console for stderr."""
    return Console(stderr=True, quiet=not _is_first(), markup=False, emoji=False)


def _is_first() -> bool:
    """True for the process that prints: rank 0 under torchrun."""
    return os.environ.get("RANK", "0") == "0"


def print_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object to stdout."""
    if _is_first():
        print(json.dumps(content, indent=2))


def new_table(*columns: str, text: str) -> Table:
    """A table that wraps the column `text` if the screen is narrow, but never numbers."""
    table = Table()
    for name in columns:
        if name == text:
            table.add_column(name, min_width=12, overflow="fold")
        else:
            table.add_column(name, no_wrap=True, justify="right")
    return table


def size(num_bytes: float) -> str:
    """Format a number of bytes with a unit.
    >>> [size(count) for count in (999, 4096, 1.5 * 2**30)]
    ['999 B', '4.0 KiB', '1.5 GiB']
    """
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    power = next((p for p in range(1, 4) if num_bytes < 1024 ** (p + 1)), 4)
    return f"{num_bytes / 1024**power:.1f} {'_KMGT'[power]}iB"


def metrics_text(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def spread(values: list[float], sign: str = "") -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.2f}{spread}"


def show_result(result: dict[str, Any], folder: Path) -> None:
    total = result["sparsity"]["totals"]
    out().print(f"test: {metrics_text(result['test'])}")
    if result["best"]:
        best = result["best"]
        out().print(f"best by validation: stage {best['stage']}, test: {metrics_text(best['test'])}")
    out().print(f"alive: {total['alive']:,} of {total['prunable']:,} prunable weights")
    out().print(f"file: {result['file_bytes']:,} bytes, {folder / 'model.safetensors'}", soft_wrap=True)
