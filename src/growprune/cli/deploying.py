"""The verb that makes trained models fast: deploy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from growprune.cli.app import AsJson, one_line_errors
from growprune.cli.screen import out as console
from growprune.cli.screen import print_json
from growprune.errors import GrowpruneError

if TYPE_CHECKING:
    from torch import Tensor, nn
ModelSource = Annotated[
    str, typer.Option("--model", metavar="FILE.py:FUNCTION", help="For a file: the function that builds its model.")
]
ExampleShape = Annotated[
    str, typer.Option("--example-shape", metavar="N,N,...", help="The input's shape; a run knows its own.")
]
ByLayer = Annotated[
    bool, typer.Option("--by-layer", help="Swap single layers only: for models that decode, such as translators.")
]
Seconds = Annotated[float, typer.Option(min=0, help="How long layers may be timed; 0 measures nothing.")]


@one_line_errors
def deploy(
    path: Annotated[Path, typer.Argument(metavar="RUN|FILE", help="The folder of a finished run, or a sparse file.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.")],
    model: ModelSource = "",
    example_shape: ExampleShape = "",
    seconds: Seconds = 10.0,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where it is to run; timed there, too.")] = "cpu",
    by_layer: ByLayer = False,
    as_json: AsJson = False,
) -> None:
    """Make a trained sparse model run on sparse kernels: each layer sparse or dense, whichever is faster here."""
    from growprune.deployment.api import checked_device
    from growprune.deployment.api import deploy as deploy_model
    from growprune.files.pretrained import weights_file

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise GrowpruneError(f"{out} exists and is not an empty folder: give another --out")
    where = checked_device(device)
    origin = origin_of(path, model, example_shape)
    built, example = build(origin)
    options: Any = {"whole": not by_layer, "device": where}
    deployed = deploy_model(weights_file(path), example, into=built, seconds=seconds, **options)
    deployed.save(out, origin=origin)
    if as_json:
        print_json(deployed.table.to_dict())
    else:
        console().print(str(deployed.table), soft_wrap=True, highlight=False)
        console().print(f"saved in {out}", soft_wrap=True, highlight=False)


def origin_of(path: Path, model: str, example_shape: str) -> dict[str, Any]:
    """Where the model's code and its example come from, as it is kept with what is deployed."""
    from growprune.engine import RunFolder
    from growprune.engine.source import absolute

    if path.is_dir():
        if not (path / "recipe.json").is_file():
            raise GrowpruneError(f"{path} is not the folder of a run: give one, or a sparse file")
        if model:
            raise GrowpruneError(f"--model is {model}, but {path} is a run, which knows its model: leave it out")
        origin = RunFolder(path).read_origin()
        if not origin.get("source"):
            raise GrowpruneError(
                f"{path} was started from Python: deploy its model with growprune.deploy(model, example)"
            )
        run = {name: origin.get(name) for name in ("source", "settings")}
        return {"run": run, "example_shape": example_shape}
    if not path.is_file():
        raise GrowpruneError(f"there is no {path}: give the folder of a run, or a sparse file")
    if not model or not example_shape:
        raise GrowpruneError(
            f"{path} is a file, which has no code: give --model FILE.py:FUNCTION, which builds its model, and "
            f"--example-shape, such as 1,3,224,224"
        )
    return {"model": absolute(model), "example_shape": example_shape}


def build(origin: dict[str, Any]) -> tuple[nn.Module, Any]:
    """A fresh model in eval mode, and an example of its input."""
    import torch

    from growprune.engine.override import override
    from growprune.engine.source import load
    from growprune.recipes import find

    shape = _shape(origin["example_shape"])
    if "run" in origin:
        run = origin["run"]
        task = override(find(run["source"]), run.get("settings") or {}).task
        example = task.example() if shape is None else _example(shape)
        return task.build_model().eval(), example
    if ":" not in origin["model"]:
        raise GrowpruneError(f"--model is {origin['model']!r}, but must be FILE.py:FUNCTION")
    built = load(origin["model"], "model")()
    if not isinstance(built, torch.nn.Module):
        raise GrowpruneError(f"{origin['model']} gave a {type(built).__name__}, but must build a module")
    assert shape is not None
    return built.eval(), _example(shape)


def _example(shape: tuple[int, ...]) -> Tensor:
    """The same in every process, so that outputs can be compared."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _shape(text: str) -> tuple[int, ...] | None:
    """1,3,224,224 as numbers."""
    if not text:
        return None
    sizes = text.replace("x", ",").split(",")
    if not all(size.strip().isdigit() and int(size) > 0 for size in sizes):
        raise GrowpruneError(f"--example-shape is {text!r}, but must be sizes such as 1,3,224,224")
    return tuple(map(int, sizes))
