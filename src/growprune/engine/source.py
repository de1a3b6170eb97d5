"""Load a function of a user, given as `path.py:function`."""

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
    """Compiles a file anew, because Python's cache misses changes within a second that keep the size."""

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError(f"nothing is kept of {path}")


def is_source(text: str) -> bool:
    """True if a string is `path.py:function`, and not a built-in name."""
    return ":" in text


def file_of(source: str) -> str:
    """The path in `path.py:function`."""
    return source.rpartition(":")[0]


def load(source: str, kind: str) -> Callable[..., Any]:
    """Load the function of `path.py:function`. `kind` is used in error messages, such as "recipe"."""
    name, _, function = source.rpartition(":")
    path = Path(name)
    if not path.is_file():
        raise GrowpruneError(f"{kind} file {path} does not exist")
    if path.suffix != ".py":
        raise GrowpruneError(f"{kind} file must end in .py, got {path}")
    own = f"{kind}_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(own, path, loader=_AsItIsNow(own, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass defined in the file looks its own types up
    spec.loader.exec_module(module)
    if not callable(found := getattr(module, function, None)):
        raise GrowpruneError(f"{path} has no function {function!r}. Give path.py:function")
    return found  # type: ignore[no-any-return]


def called(function: Callable[..., Any], source: str) -> Any:
    """Call a function without arguments. `source` is its place, for error messages."""
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise GrowpruneError(f"{source} must work without arguments: {error}. Give each a default") from None
    return function()


def absolute(source: str) -> str:
    """Make the path in `path.py:function` absolute."""
    path, _, function = source.rpartition(":")
    return f"{Path(path).resolve()}:{function}" if path else source
