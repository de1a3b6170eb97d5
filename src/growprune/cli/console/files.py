"""What a sparse file holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from growprune.cli.console.screen import out, print_json, size
from growprune.errors import GrowpruneError
from growprune.files import sparse_file as file
from growprune.files.sparse_file import StoredTensor, contents


def show_file(path: Path, *, as_json: bool = False) -> None:
    """Show a file and what each of its tensors takes, and raise if any is not as it was saved."""
    about, tensors = file.manifest(path), contents(path)
    _print_json(path, about, tensors) if as_json else _show(path, about, tensors)
    damaged = [tensor.name for tensor in tensors if tensor.state == "damaged"]
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        raise GrowpruneError(f"{path} has {damaged[0]}{more} not as saved: it is damaged, fetch or save it again")


def _print_json(path: Path, about: dict[str, Any], tensors: Sequence[StoredTensor]) -> None:
    """The manifest, each tensor with what was looked at."""
    for tensor in tensors:
        looked_at = {"sparsity": tensor.sparsity, "bytes": tensor.num_bytes, "digest": tensor.state}
        about["tensors"][tensor.name] |= looked_at
    print_json({"kind": "file", "path": str(path), **about})


def _show(path: Path, about: dict[str, Any], tensors: Sequence[StoredTensor]) -> None:
    totals = about["totals"]
    out.print(
        f"{path}: pattern {about['pattern']}, sparsity {about['sparsity']:g} ({about['allocation']}), format "
        f"{about['version']}",
        soft_wrap=True,
        highlight=False,
    )
    out.print(_table(tensors))
    share = 1 - totals["prunable_nnz"] / totals["prunable"] if totals["prunable"] else 0.0
    out.print(
        f"{totals['prunable_nnz']:,} of {totals['prunable']:,} prunable weights live: sparsity {share:.4f}\n"
        f"{totals['bytes']:,} bytes with its header; dense, its tensors take {totals['dense_bytes']:,}",
        highlight=False,
        soft_wrap=True,
    )


def _table(tensors: Sequence[StoredTensor]) -> Table:
    """A row a prunable tensor; the others, which are many and small, in one."""
    table = Table()
    table.add_column("layer", overflow="fold", min_width=12)
    for name in ("shape", "live", "sparsity", "bytes", "digest"):
        table.add_column(name, no_wrap=True, justify="right")
    layers = [tensor for tensor in tensors if tensor.is_prunable]
    others = [tensor for tensor in tensors if not tensor.is_prunable]
    for layer in layers:
        shape = "x".join(map(str, layer.shape))
        table.add_row(layer.name, shape, f"{layer.alive:,}", f"{layer.sparsity:.4f}", _bytes([layer]), _state([layer]))
    if others:
        alive = sum(tensor.alive for tensor in others)
        table.add_row(f"{len(others)} dense tensors", "", f"{alive:,}", "", _bytes(others), _state(others))
    table.add_section()
    alive = sum(tensor.alive for tensor in tensors)
    table.add_row("all", "", f"{alive:,}", "", _bytes(tensors), _state(tensors))
    return table


def _bytes(tensors: Sequence[StoredTensor]) -> str:
    return size(sum(tensor.num_bytes for tensor in tensors))


def _state(tensors: Sequence[StoredTensor]) -> str:
    """The worst of all."""
    return "damaged" if any(tensor.state == "damaged" for tensor in tensors) else "ok"
