"""The verb that turns one file of weights into another: convert."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from growprune.cli.app import AsJson, one_line_errors
from growprune.errors import GrowpruneError


@one_line_errors
def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A file or folder of weights, ours or another's.")],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="What to write; its name says which kind.")],
    to: Annotated[str, typer.Option(help="sparse, dense, hf, onnx or openvino, if the name does not say it.")] = "",
    format: Annotated[str, typer.Option("--from", help="What SOURCE is, if its content is not to decide.")] = "",
    model: Annotated[
        str, typer.Option(metavar="FUNCTION", help="path.py:function or module:function that returns the model.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace what is at DEST.")] = False,
    as_json: AsJson = False,
) -> None:
    """Convert weights between sparse files, dense ones and folders, and from pruned checkpoints of other tools."""
    from growprune.cli.console.conversions import show_conversion
    from growprune.files.convert import convert

    built, example = _build(model) if model else (None, None)
    done = convert(source, dest, to=to or None, format=format or None, model=built, example=example, force=force)
    show_conversion(done, as_json=as_json)


def _build(text: str) -> tuple[Any, Any]:
    """The model that a function returns, and the example input that may come with it."""
    from torch import nn

    from growprune.engine.source import called

    made = called(_find(text), text)
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise GrowpruneError(
            f"{text} returned {type(made).__name__}, but must return a module, or a tuple of it and an example input"
        )
    return model, example


def _find(text: str) -> Any:
    from growprune.engine.source import load

    place, colon, function = text.rpartition(":")
    if not colon or not place:
        raise GrowpruneError(f"--model is {text!r}, but must be path.py:function or module:function")
    if place.endswith(".py") or Path(place).is_file():
        return load(text, "model")
    try:
        return getattr(importlib.import_module(place), function)
    except (ImportError, AttributeError) as error:
        raise GrowpruneError(f"--model is {text!r}, which cannot be found ({error})") from None
