"""A function of a user's own, named as `path.py:function`."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from growprune.errors import GrowpruneError


class _AsItIsNow(SourceFileLoader):
    """Compiles a file anew: Python's own cache takes one of the same second and size for the same."""

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError(f"nothing is kept of {path}")


def is_source(text: str) -> bool:
    """Whether a text names a function in a file, rather than something of ours."""
    return ":" in text


def load(source: str, kind: str) -> Callable[..., Any]:
    """The function that `path.py:function` names; `kind` says for errors what the file should hold."""
    name, _, function = source.rpartition(":")
    path = Path(name)
    if not path.is_file():
        raise GrowpruneError(f"there is no {kind} file {path}")
    if path.suffix != ".py":
        raise GrowpruneError(f"{path} is not a Python file")
    own = f"{kind}_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(own, path, loader=_AsItIsNow(own, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass defined in the file looks its own types up
    spec.loader.exec_module(module)
    if not callable(found := getattr(module, function, None)):
        raise GrowpruneError(f"{path} has no function {function!r}")
    return found  # type: ignore[no-any-return]


def called(function: Callable[..., Any], source: str) -> Any:
    """What a function returns without arguments; `source` says for errors where it is."""
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise GrowpruneError(f"{source} is called without arguments, but {error}: give each a default") from None
    return function()


def absolute(source: str) -> str:
    """The same source, found from any folder."""
    path, _, function = source.rpartition(":")
    return f"{Path(path).resolve()}:{function}" if path else source
