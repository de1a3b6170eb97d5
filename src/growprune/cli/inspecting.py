"""The verbs that show a run, a file or this machine: inspect, doctor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from growprune.cli.app import AsJson, one_line_errors
from growprune.cli.screen import new_table, out, print_json, say, show_result, size
from growprune.errors import GrowpruneError

if TYPE_CHECKING:
    from growprune.files.sparse_file import StoredTensor
    from growprune.runs import Record

SPLITS = ("validation", "candidate")


@one_line_errors
def inspect(
    path: Annotated[Path, typer.Argument(metavar="FILE|DIR", help="Sparse file or run folder.")],
    as_json: AsJson = False,
) -> None:
    """Show the contents of a sparse file or a run folder."""
    _inspect_run(path, as_json) if path.is_dir() else _inspect_file(path, as_json)


@one_line_errors
def doctor(as_json: AsJson = False) -> None:
    """Check this machine: versions, devices, kernels, speed.

    The exit code is 1 if something is broken.
    """
    from growprune.cli.machine import examine, show_findings

    findings = list(examine())
    is_broken = any(finding.state == "broken" for finding in findings)
    if as_json:
        print_json({"is_broken": is_broken, "findings": [asdict(finding) for finding in findings]})
    else:
        show_findings(findings)
    if is_broken:
        raise typer.Exit(1)


# Runs


def _inspect_run(path: Path, as_json: bool) -> None:
    from growprune.engine import RunFolder
    from growprune.files.disk import finite
    from growprune.runs import read_run

    run = read_run(path)
    if run.damage or not run.recipe:
        raise GrowpruneError(run.damage or f"{path} is not a run folder: it has no recipe.json")
    if as_json:
        result = None if run.result is None else finite(run.result.to_dict())
        about = {"recipe": run.recipe, "origin": run.origin, "result": result}
        print_json({"kind": "run", "path": str(path), "is_finished": run.is_finished, **about})
    else:
        _show_run(run)
    folder = RunFolder(path)
    if run.result is not None and folder.recipe.exists():  # else only the result was kept
        folder.check_model(run.result.to_dict())


def _show_run(run: Record) -> None:
    from growprune.engine import RunFolder

    source = run.origin.get("source", "a run from Python")
    say(f"{source}: {run.recipe['method']} at sparsity {run.recipe['sparsity']}")
    if run.result is not None:
        out().print(_history(run))
        show_result(run.result.to_dict(), run.path)
        return
    for row in run.history[-1:]:
        figures = {name: row.get(name) for name in ("epoch", "loss", "density")}
        figures |= {f"validation {name}": value for name, value in (row.get("validation") or {}).items()}
        known = (f"{name} {value:.4g}" for name, value in figures.items() if value is not None)
        say(f"so far: {', '.join(known)}")
    if run.status == "failed":
        say(f"failed: {run.why}")
    say(f"Not finished. Resume with {RunFolder(run.path).how_to_resume()}")


def _history(run: Record) -> Table:
    """A table with the last epoch of each phase and the main metric."""
    chosen: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for epoch in run.history:  # the last validated epoch of each phase, or its last epoch if none was validated
        key = epoch["stage"], epoch["branch"], epoch["edits"]
        if epoch.get("validation") or key not in chosen:
            chosen[key] = epoch
    rows = list(chosen.values())
    has_branches = any(row["branch"] is not None for row in rows)
    columns = ["stage", *(["branch"] if has_branches else []), "edits", "epoch", "alive", *SPLITS]
    shown = new_table(*columns, text="edits")
    for row in rows:
        branch = ["" if row["branch"] is None else str(row["branch"])] if has_branches else []
        metrics = [(row.get(split) or {}).get(run.metric.name) for split in SPLITS]
        scores = ["" if score is None else f"{score:.4g}" for score in metrics]
        shown.add_row(str(row["stage"]), *branch, row["edits"], str(row["epoch"]), f"{row['alive']:,}", *scores)
    shown.caption = f"{run.metric.name} on validation data; candidate: if pruned to the target right then"
    return shown


# Files


def _inspect_file(path: Path, as_json: bool) -> None:
    from growprune.files import sparse_file
    from growprune.files.sparse_file import contents

    about, tensors = sparse_file.manifest(path), contents(path)
    if as_json:
        for tensor in tensors:
            looked_at = {"sparsity": tensor.sparsity, "bytes": tensor.num_bytes, "digest": tensor.state}
            about["tensors"][tensor.name] |= {**looked_at, "bytes_per_live": tensor.bytes_per_live}
        print_json({"kind": "file", "path": str(path), **about})
    else:
        totals = about["totals"]
        about_mask = f"pattern {about['pattern']}, sparsity {about['sparsity']:g} ({about['allocation']})"
        say(f"{path}: {about_mask}, format {about['version']}")
        out().print(_tensor_table(tensors))
        share = 1 - totals["prunable_nnz"] / totals["prunable"] if totals["prunable"] else 0.0
        say(
            f"{totals['prunable_nnz']:,} of {totals['prunable']:,} prunable weights live: sparsity {share:.4f}\n"
            f"{totals['bytes']:,} bytes with its header; {totals['dense_bytes']:,} bytes if stored dense"
        )
    damaged = [tensor.name for tensor in tensors if tensor.state == "damaged"]
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        raise GrowpruneError(f"{path} is damaged: the digest of {damaged[0]}{more} is wrong. Download or save it again")


def _tensor_table(tensors: Sequence[StoredTensor]) -> Table:
    """One row per prunable tensor, and one row for all others."""
    table = new_table("layer", "shape", "live", "sparsity", "bytes", "per live", "digest", text="layer")

    def add(first: str, some: Sequence[StoredTensor], shape: str = "", sparsity: str = "") -> None:
        alive, num_bytes = sum(tensor.alive for tensor in some), sum(tensor.num_bytes for tensor in some)
        sizes = (size(num_bytes), f"{num_bytes / alive:.2f}" if alive else "")
        state = "damaged" if any(tensor.state == "damaged" for tensor in some) else "ok"
        table.add_row(first, shape, f"{alive:,}", sparsity, *sizes, state)

    layers = [tensor for tensor in tensors if tensor.is_prunable]
    others = [tensor for tensor in tensors if not tensor.is_prunable]
    for layer in layers:
        add(layer.name, [layer], "x".join(map(str, layer.shape)), f"{layer.sparsity:.4f}")
    if others:
        add(f"{len(others)} dense tensors", others)
    table.add_section()
    add("all", tensors)
    return table
