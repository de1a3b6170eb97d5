"""Load a function of a user, given as `path.py:function`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from growprune.errors import GrowpruneError


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
    module = ModuleType(f"{kind}_file_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where a dataclass defined in the file looks its own types up
    # not by an import: Python's cache misses changes within a second that keep the size
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))
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
