"""The verbs that take trained models elsewhere: convert their files, deploy them on sparse kernels."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from growprune.cli.app import AsJson, Trust, check_new_folder, one_line_errors, trusted_origin
from growprune.cli.screen import new_table, print_json, remark, say, size
from growprune.cli.screen import out as console
from growprune.errors import GrowpruneError

if TYPE_CHECKING:
    from torch import Tensor, nn
ModelSource = Annotated[
    str,
    typer.Option("--model", metavar="FUNCTION", help="path.py:function or module:function that builds the model."),
]
ExampleShape = Annotated[
    str,
    typer.Option(
        "--example-shape", metavar="N,N,...", help="Shape of an input: 1,3,224,224, or 1,128:int. A run knows its own."
    ),
]
ByLayer = Annotated[
    bool, typer.Option("--by-layer", help="Replace layers one by one, as is done for models with a method generate.")
]


@one_line_errors
def deploy(
    path: Annotated[
        Path, typer.Argument(metavar="RUN|FILE", help="Folder of a finished run, a sparse file or an ONNX file.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")],
    model: ModelSource = "",
    example_shape: ExampleShape = "",
    seconds: Annotated[float, typer.Option(min=0, help="Time limit for timing layers. 0: no timing.")] = 10.0,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Device to run on. Layers are timed there.")] = "cpu",
    by_layer: ByLayer = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Make a trained sparse model run faster on this machine.

    Each layer runs on a sparse or a dense kernel, whichever is faster here.
    """
    from growprune.deployment.api import checked_device
    from growprune.deployment.api import deploy as deploy_model
    from growprune.files.weights_file import weights_file

    check_new_folder(out)
    where = checked_device(device)
    origin = origin_of(path, model, example_shape, trust=trust)
    built, example = build(origin)
    options: Any = {"whole": False if by_layer else None, "device": where, "seconds": seconds}
    if "onnx" in origin:
        deployed = deploy_model(path, example, **options)
    else:
        deployed = deploy_model(weights_file(path), example, into=built, **options)
    deployed.save(out, origin=origin)
    if as_json:
        print_json(deployed.table.to_dict())
    else:
        say(f"{deployed.table}\nsaved to {out}")


def origin_of(path: Path, model: str, example_shape: str, *, trust: bool = False) -> dict[str, Any]:
    """Where the code of the model and the example input come from. Saved with the deployed model."""
    from growprune.engine import RunFolder
    from growprune.engine.override import absolute

    if path.is_dir():
        if not (path / "recipe.json").is_file():
            raise GrowpruneError(f"{path} is not a run folder (no recipe.json). Give a run folder or a sparse file")
        if model:
            raise GrowpruneError(f"--model is only for files, but {path} is a run; got {model}. Leave --model out")
        origin = trusted_origin(RunFolder(path), trust)
        if not origin.get("source"):
            raise GrowpruneError(
                f"{path} was started from Python. Deploy its model with growprune.deploy(model, example)"
            )
        run = {name: origin.get(name) for name in ("source", "settings")}
        return {"run": run, "example_shape": example_shape}
    if not path.is_file():
        raise GrowpruneError(f"{path} does not exist. Give a run folder, a sparse file or an ONNX file")
    if path.suffix == ".onnx":
        if model:
            raise GrowpruneError(f"an ONNX file has the code of its model; got --model {model}. Leave --model out")
        return {"onnx": str(path.resolve()), "example_shape": example_shape}
    if not model:
        raise GrowpruneError(
            f"{path} is a file and has no model code. Add --model FILE.py:FUNCTION, which builds the model, and "
            f"--example-shape, such as 1,3,224,224"
        )
    return {"model": absolute(model) if ".py:" in model else model, "example_shape": example_shape}


def build(origin: dict[str, Any]) -> tuple[nn.Module, Any]:
    """Build the model in eval mode, and an example input."""
    from growprune.engine.override import override
    from growprune.recipes import find

    shape = origin["example_shape"]
    if "onnx" in origin:
        from growprune.files.onnx_import import from_onnx

        read = from_onnx(origin["onnx"])
        return read, example_of(shape) if shape else read.example
    if "run" in origin:
        task = override(find(origin["run"]["source"]), origin["run"].get("settings") or {}).task
        model, example = task.build_model(), None if shape else task.example()
    else:
        model, example = build_model(origin["model"])
    if not shape and example is None:
        raise GrowpruneError(
            "no example input: pass --example-shape, or a --model that returns the model and an example"
        )
    return model.eval(), example_of(shape) if shape else example


def build_model(text: str) -> tuple[nn.Module, Any]:
    """Call the user's function. Return the model, and the example input if the function returns one too."""
    from torch import nn

    from growprune.engine.override import called, load

    place, colon, name = text.rpartition(":")
    if not colon or not place:
        raise GrowpruneError(f"--model must be path.py:function or module:function, got {text!r}")
    if place.endswith(".py") or Path(place).is_file():
        function = load(text, "model")
    else:
        try:
            function = getattr(importlib.import_module(place), name)
        except (ImportError, AttributeError) as error:
            raise GrowpruneError(f"--model {text!r} was not found ({error}). Check the module and the name") from None
    made = called(function, text)
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise GrowpruneError(
            f"--model {text} must return an nn.Module or a tuple (module, example input), got {type(made).__name__}"
        )
    return model, example


def example_of(text: str) -> Tensor:
    """Make an input of a shape such as 1,3,224,224, or 1,128:int for integers; the same numbers in every process."""
    import torch

    sizes, colon, kind = text.replace("x", ",").partition(":")
    shape = [size.strip() for size in sizes.split(",")]
    if not all(size.isdigit() and int(size) > 0 for size in shape) or (colon and kind != "int"):
        raise GrowpruneError(
            f"--example-shape must be integers >= 1 such as 1,3,224,224, or 1,128:int for integer inputs, got {text!r}"
        )
    generator = torch.Generator().manual_seed(0)
    if kind == "int":
        return torch.randint(0, 2, [*map(int, shape)], generator=generator)
    return torch.randn([*map(int, shape)], generator=generator)


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
    console().print(sizes)
    alive = sum(matrix["alive"] for matrix in done.matrices.values())
    say(f"sparse matrices: {len(done.matrices)}, with {alive:,} live weights, sparsity {done.sparsity:.4f}")
    for note in done.notes:
        remark(f"growprune: {note}")
