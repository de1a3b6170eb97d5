"""The verb that converts files of weights: convert."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from growprune.cli.app import AsJson, one_line_errors
from growprune.cli.deploying import ExampleShape, example_of, parse_shape
from growprune.cli.screen import err, new_table, out, print_json, size
from growprune.errors import GrowpruneError

if TYPE_CHECKING:
    from growprune.files.convert import Converted

MAX_ROWS = 40


@one_line_errors
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="File or folder with weights, of growprune or another tool.")
    ],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="File or folder to write. Its name sets the format.")],
    to: Annotated[str, typer.Option(help="Format of DEST: sparse, dense, hf, onnx or openvino.")] = "",
    model: Annotated[
        str, typer.Option(metavar="FUNCTION", help="path.py:function or module:function that builds the model.")
    ] = "",
    example_shape: ExampleShape = "",
    values: Annotated[
        str, typer.Option(help="int8: store the weights of a sparse file in 8 bits. Default: as they are.")
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite DEST. If it is a link, overwrite its target.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Convert weights between sparse, dense and other formats.

    It reads pruned checkpoints of other tools too.
    """
    from growprune.files.convert import convert

    if example_shape and not model:
        raise GrowpruneError(f"--example-shape needs --model, got only --example-shape {example_shape}: add --model")
    built, example = _build(model) if model else (None, None)
    if (shape := parse_shape(example_shape)) is not None:
        example = example_of(shape)
    options: Any = {"to": to or None, "values": values or None}
    done = convert(source, dest, model=built, example=example, force=force, **options)
    print_json(_content(done)) if as_json else _show(done)


def _build(text: str) -> tuple[Any, Any]:
    """Build the model with the user's function, and the example input if it returns one."""
    from torch import nn

    from growprune.engine.source import called

    made = called(_find(text), text)
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise GrowpruneError(
            f"--model {text} must return an nn.Module or a tuple (module, example input), got {type(made).__name__}"
        )
    return model, example


def _find(text: str) -> Any:
    from growprune.engine.source import load

    place, colon, function = text.rpartition(":")
    if not colon or not place:
        raise GrowpruneError(f"--model must be path.py:function or module:function, got {text!r}")
    if place.endswith(".py") or Path(place).is_file():
        return load(text, "model")
    try:
        return getattr(importlib.import_module(place), function)
    except (ImportError, AttributeError) as error:
        raise GrowpruneError(f"--model {text!r} was not found ({error}). Check the module and the name") from None


def _show(done: Converted) -> None:
    """Print the sizes before and after, and the sparse matrices."""
    out().print(_sizes(done))
    if done.matrices:
        out().print(_matrices(done))
    for note in done.notes:
        err().print(f"growprune: {note}", soft_wrap=True, highlight=False)


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
    """One row per sparse matrix, MAX_ROWS at most, and a row with the total."""
    table = new_table("sparse matrix", "shape", "live", "sparsity", text="sparse matrix")
    for matrix in done.matrices[:MAX_ROWS]:
        share = 1 - matrix.alive / math.prod(matrix.shape)
        table.add_row(matrix.name, "x".join(map(str, matrix.shape)), f"{matrix.alive:,}", f"{share:.4f}")
    if (more := len(done.matrices) - MAX_ROWS) > 0:
        table.add_row(f"{more} more")
    table.add_section()
    alive = sum(matrix.alive for matrix in done.matrices)
    table.add_row("total", "", f"{alive:,}", f"{done.sparsity:.4f}")
    return table
