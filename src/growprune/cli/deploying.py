"""The verbs that make trained models fast: deploy, bench."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from growprune.cli.app import AsJson, one_line_errors
from growprune.cli.screen import out as console
from growprune.cli.screen import print_json
from growprune.errors import GrowpruneError

if TYPE_CHECKING:
    from torch import nn

    from growprune.deployment.bench import Timing
    from growprune.deployment.deployed import Deployed

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
    origin = _origin(path, model, example_shape)
    built, example = _built(origin)
    options: Any = {"whole": not by_layer, "device": where}
    deployed = deploy_model(weights_file(path), example, into=built, seconds=seconds, **options)
    deployed.save(out, origin=origin)
    if as_json:
        print_json(deployed.table.to_dict())
    else:
        console().print(str(deployed.table), soft_wrap=True, highlight=False)
        how = f": time it with `growprune bench {shlex.quote(str(out))}`" if where.type == "cpu" else ""
        console().print(f"saved in {out}{how}", soft_wrap=True, highlight=False)


@one_line_errors
def bench(
    path: Annotated[Path, typer.Argument(metavar="DIR|RUN|FILE", help="What `growprune deploy` wrote, or takes.")],
    model: ModelSource = "",
    example_shape: ExampleShape = "",
    engines: Annotated[str, typer.Option(metavar="NAME,NAME,...", help="Which engines; all by default.")] = "",
    threads: Annotated[int, typer.Option(min=0, help="Threads of each engine; as torch has it by default.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="How many turns each engine gets.")] = 15,
    python: Annotated[str, typer.Option(metavar="FILE", help="Interpreter for onnxruntime and OpenVINO.")] = "",
    as_json: AsJson = False,
) -> None:
    """Time the whole model against torch, torch.compile, onnxruntime and OpenVINO, each in a process, in turns."""
    from growprune.deployment import bench as benching

    arguments = {"path": str(path.resolve()), "model": model, "example_shape": example_shape}
    open_model(**arguments)  # what is wrong is said here, in one line
    options: dict[str, Any] = {"python": python} if python else {}
    chosen = tuple(engines.split(",")) if engines else benching.ENGINES
    loader = "growprune.cli.deploying:open_model"
    found = benching.bench(loader, arguments, engines=chosen, threads=threads, rounds=rounds, **options)
    if as_json:
        print_json({"engines": [dataclasses.asdict(timing) for timing in found]})
    else:
        _show_bench(found)


def open_model(path: str, model: str, example_shape: str) -> tuple[Any, Any, Callable[[], Deployed] | None]:
    """The model in torch, an example, and, of a deployed folder, what loads it. Engines call it in their processes."""
    from growprune.deployment.api import load_deployed
    from growprune.deployment.deployed_folder import ABOUT, read_about
    from growprune.files import sparse_file
    from growprune.files.pretrained import weights_file

    folder = Path(path)
    is_deployed = (folder / ABOUT).is_file()
    if is_deployed and read_about(folder)["device"] != "cpu":
        raise GrowpruneError(f"{folder} is deployed on cuda, but bench compares engines on the CPU: deploy it there")
    origin = dict(read_about(folder)["origin"]) if is_deployed else _origin(folder, model, example_shape)
    if is_deployed and not origin and not model:
        raise GrowpruneError(f"{folder} was deployed from Python: say what builds its model with --model and its shape")
    origin = origin or _origin(folder / "model.safetensors", model, example_shape)
    built, example = _built(origin)
    sparse = sparse_file.load(weights_file(folder), built)
    return sparse.model.eval(), example, (lambda: load_deployed(folder, _built(origin)[0])) if is_deployed else None


def _origin(path: Path, model: str, example_shape: str) -> dict[str, Any]:
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


def _built(origin: dict[str, Any]) -> tuple[nn.Module, Any]:
    """A fresh model in eval mode, and an example of its input."""
    import torch

    from growprune.engine.override import override
    from growprune.engine.source import load
    from growprune.recipes import find

    shape = _shape(origin["example_shape"])
    if "run" in origin:
        run = origin["run"]
        task = override(find(run["source"]), run.get("settings") or {}).task
        example = task.example() if shape is None else torch.randn(shape)
        return task.build_model().eval(), example
    if ":" not in origin["model"]:
        raise GrowpruneError(f"--model is {origin['model']!r}, but must be FILE.py:FUNCTION")
    built = load(origin["model"], "model")()
    if not isinstance(built, torch.nn.Module):
        raise GrowpruneError(f"{origin['model']} gave a {type(built).__name__}, but must build a module")
    assert shape is not None
    return built.eval(), torch.randn(shape)


def _shape(text: str) -> tuple[int, ...] | None:
    """1,3,224,224 as numbers."""
    if not text:
        return None
    sizes = text.replace("x", ",").split(",")
    if not all(size.strip().isdigit() and int(size) > 0 for size in sizes):
        raise GrowpruneError(f"--example-shape is {text!r}, but must be sizes such as 1,3,224,224")
    return tuple(map(int, sizes))


def _show_bench(timings: Sequence[Timing]) -> None:
    """A row an engine, and how the deployed model compares with the fastest of the others."""
    table = Table()
    table.add_column("engine")
    for name in ("ms", "spread", "error"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("", overflow="fold")
    for one in timings:
        if one.ms is None:
            table.add_row(one.engine, "-", "-", "-", f"not measured: {one.why}")
        else:
            table.add_row(one.engine, f"{one.ms:.3f}", f"{one.spread or 0:.0%}", f"{one.error or 0:.1e}", "")
    console().print(table, highlight=False)
    console().print(conclusion(timings), soft_wrap=True, highlight=False)


def conclusion(timings: Sequence[Timing]) -> str:
    """Only of what was measured."""
    others = {t.engine: t.ms for t in timings if t.ms is not None}
    spreads = {t.engine: t.spread or 0 for t in timings}
    missing = [t.engine for t in timings if t.ms is None]
    left_out = f"; {', '.join(missing)} not measured" if missing else ""
    ours = others.pop("deployed", None)
    if ours is None or not others:
        return f"nothing to compare{left_out}"
    best = min(others, key=lambda engine: others[engine])
    noise = max(spreads["deployed"], spreads[best])
    return f"{others[best] / ours:.2f} times as fast as the best of the others, {best} (spread {noise:.0%}){left_out}"
