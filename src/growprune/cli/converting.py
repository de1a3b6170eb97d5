"""The verb that converts files of weights: convert."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from growprune.cli.app import AsJson, one_line_errors
from growprune.cli.deploying import ExampleShape, ModelSource, build_model, example_of
from growprune.cli.screen import new_table, out, print_json, remark, say, size
from growprune.errors import GrowpruneError


@one_line_errors
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="File or folder with weights, of growprune or another tool.")
    ],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="File or folder to write. Its name sets the format.")],
    to: Annotated[str, typer.Option(help="Format of DEST: sparse, dense, hf or onnx.")] = "",
    model: ModelSource = "",
    example_shape: ExampleShape = "",
    sparse: Annotated[
        bool, typer.Option("--sparse", help="ONNX: store only the non-zero weights. Any runtime reads the file.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite DEST. If it is a link, overwrite its target.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Convert weights between sparse, dense and other formats.

    It reads pruned checkpoints of other tools too.
    """
    from growprune.files.convert import convert

    if example_shape and not model and not (source / "config.json").is_file():
        raise GrowpruneError(f"--example-shape needs --model, got only --example-shape {example_shape}: add --model")
    built, example = build_model(model) if model else (None, None)
    example = example_of(example_shape) if example_shape else example
    done = convert(source, dest, to=to or None, model=built, example=example, sparse=sparse, force=force)
    if as_json:
        content = {
            "source": {"path": str(done.source), "format": done.format, "bytes": done.source_bytes},
            "dest": {"path": str(done.dest), "format": done.to, "bytes": done.dest_bytes},
        }
        names = ("dense_bytes", "sparsity", "matrices", "notes")
        print_json(content | {name: getattr(done, name) for name in names})
        return
    sizes = new_table("", "file", "format", "size", "of dense", text="file")
    rows = (("from", done.source, done.format, done.source_bytes), ("to", done.dest, done.to, done.dest_bytes))
    for word, path, format, num_bytes in rows:
        share = f"{num_bytes / done.dense_bytes:.2f}x" if done.dense_bytes else ""
        sizes.add_row(word, str(path), format, size(num_bytes), share)
    out().print(sizes)
    alive = sum(matrix["alive"] for matrix in done.matrices.values())
    say(f"sparse matrices: {len(done.matrices)}, with {alive:,} live weights, sparsity {done.sparsity:.4f}")
    for note in done.notes:
        remark(f"growprune: {note}")
