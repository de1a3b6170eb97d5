"""Load a function of a user, given as `path.py:function`, and say when the user's code has changed."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from growprune.errors import GrowpruneError, is_users_file


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
    module = _module(path.resolve(), path.read_bytes())
    if not callable(found := getattr(module, function, None)):
        raise GrowpruneError(f"{path} has no function {function!r}. Give path.py:function")
    return found  # type: ignore[no-any-return]


@functools.cache
def _module(path: Path, content: bytes) -> ModuleType:
    """Execute a user's file: once in a process, unless its content changes. (Python's own cache can miss a change.)"""
    module = ModuleType(f"growprune_file_{path.stem}_{_digest(str(path).encode())}")  # files of one stem stay apart
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where a dataclass defined in the file looks its own types up
    exec(compile(content, str(path), "exec", dont_inherit=True), vars(module))
    return module


def digests(*sources: str) -> dict[str, str]:
    """Digests of the user's files that sources name, and of the user's own modules that these import, by file name.

    Built-in names have none. Files in the folder of the first one have their path in it, and others their name.
    """
    found: dict[Path, str] = {}
    waiting = [Path(file_of(source)).resolve() for source in sources if is_source(source)]
    folder = waiting[0].parent if waiting else Path()
    while waiting:
        path = waiting.pop()
        if path not in found:
            content = path.read_bytes()
            found[path] = _digest(content)
            waiting += _own_imports(path, content)
    named: dict[str, str] = {}
    for path, digest in sorted(found.items()):
        name = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name
        named[name if name not in named else f"{path.parent.name}/{name}"] = digest
    return named


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _own_imports(path: Path, content: bytes) -> Iterator[Path]:
    """Files of the user's own modules that a file imports. Nothing is executed for it."""
    for node in ast.walk(ast.parse(content, str(path))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        search = None
        if isinstance(node, ast.ImportFrom):
            base = f"{node.module}." if node.module else ""
            names = [f"{base}{alias.name}" for alias in node.names]
            search = [str(path.parents[node.level - 1])] if node.level else None
        for name in names:
            yield from _files_of_module(name.split("."), search)


def _files_of_module(parts: list[str], search: list[str] | None) -> Iterator[Path]:
    """The user's files of a module and the packages that contain it. The last parts may be names in a module."""
    for n in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:n]), search)
        if spec is None:
            return
        if spec.origin and spec.origin.endswith(".py") and is_users_file(spec.origin):
            yield Path(spec.origin).resolve()
        if spec.submodule_search_locations is None:
            return
        search = list(spec.submodule_search_locations)


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
