"""From strings to recipes: a user's function as `path.py:function`, and `--set key=value` with a check of its type."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import json
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from growprune.engine.recipe import Recipe, own_options
from growprune.errors import MAX_VALUE, GrowpruneError, is_users_file, shorten
from growprune.methods import METHODS
from growprune.methods import find_method as find_known
from growprune.plan import Plan, declaration_of


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
    for path, digest in sorted(found.items(), key=lambda each: (not each[0].is_relative_to(folder), each[0])):
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


Changes = dict[str, Any]
"""New values by field; another such dict for a field that is a dataclass."""


def override(recipe: Recipe, settings: Mapping[str, str]) -> Recipe:
    """Change fields of a recipe. Dots name nested fields, as in `task.width` or `options.steps`."""
    if "method" in settings:  # first, because the options that may be set are the method's
        method = find_method(settings["method"])
        options = {name: value for name, value in recipe.options.items() if name in own_options(method)}
        is_whole = declaration_of(recipe.method).length in ("iterations", "epochs")
        if declaration_of(method).length == "iterations" and not is_whole:
            options.pop("epochs", None)  # those of a step, and not of the whole training
        recipe = replace(recipe, method=method, options=options)
    changes: Changes = {}
    for key, text in settings.items():
        path = key.split(".")
        if path == ["options"]:  # all of them, as a JSON object
            recipe = replace(recipe, options={})
            for name, value in convert(text, dict, key).items():
                said = value if isinstance(value, str) else json.dumps(value)
                recipe = _with_option(recipe, [name], said, f"options.{name}")
        elif path[0] == "options":
            recipe = _with_option(recipe, path[1:], text, key)
        elif path == ["parts"]:
            recipe = replace(recipe, parts=int(text) if text.isdecimal() else text)
        elif key != "method":
            _add(changes, recipe, path, text, key)
    changed: Recipe = _changed(recipe, changes)
    return changed


def parse_settings(texts: Sequence[str]) -> dict[str, str]:
    """Parse settings: ["a=1", "b.c=x"] -> {"a": "1", "b.c": "x"}"""
    for text in texts:
        if "=" not in text:
            raise GrowpruneError(f"--set must be KEY=VALUE, such as sparsity=0.8, got {text!r}")
    return {key.strip(): value.strip() for key, _, value in (text.partition("=") for text in texts)}


def with_places(settings: Mapping[str, str], recipe: Recipe, data: str = "") -> dict[str, str]:
    """Add `--data` to settings. Paths become absolute, so that a run can be resumed from any folder."""
    if data and not recipe.task.reads_files:
        raise GrowpruneError(
            f"--data is not used by the task {type(recipe.task).__name__}, which reads no files; got {data}. "
            f"Leave --data out"
        )
    paths = {"weights": settings.get("weights"), "task.data": data}
    return {**settings, **{name: str(Path(path).resolve()) for name, path in paths.items() if path}}


def find_method(name: str) -> Callable[..., Plan]:
    """Find a method by its name in `METHODS`, or as `path.py:function`."""
    if not is_source(name):
        return METHODS.get(name) or find_known(name, otherwise=", or give path.py:function")
    found = load(name, "method")
    declaration_of(found)  # raises if it is no method
    return found


def _add(changes: Changes, value: Any, path: list[str], text: str, key: str) -> None:
    """Add a change of one field, which may be nested."""
    name, *inner = path
    hints = get_type_hints(type(value))
    known = {f.name: hints[f.name] for f in fields(value)}
    if name not in known:
        nested = [f"options.{option}" for option in own_options(value.method)] if isinstance(value, Recipe) else []
        for outer in fields(value):
            inside = getattr(value, outer.name)
            nested += [f"{outer.name}.{inner.name}" for inner in (fields(inside) if is_dataclass(inside) else ())]
        meant = [setting for setting in nested if setting.partition(".")[2] == name]
        hint = f"Did you mean {meant[0]}?" if meant else f"Fields are: {', '.join(known)}"
        raise GrowpruneError(f"--set {key}: unknown field {name!r}. {hint}")
    inside = getattr(value, name)
    if is_dataclass(inside) and inner:
        _add(changes.setdefault(name, {}), inside, inner, text, key)
    elif is_dataclass(inside):
        raise GrowpruneError(f"--set {key}: set one of its fields, such as {key}.{fields(inside)[0].name}=...")
    elif inner:
        raise GrowpruneError(f"--set {key}: {name} has no nested fields. Set {name} itself")
    else:
        changes[name] = convert(text, known[name], key)


def _changed(value: Any, changes: Changes) -> Any:
    """Make all changes at once, because fields are checked together: heads=4 may only go with d_model=64."""
    inside = {name: getattr(value, name) for name in changes}
    inner = {name: _changed(old, changes[name]) for name, old in inside.items() if is_dataclass(old)}
    return replace(value, **(changes | inner))


def _with_option(recipe: Recipe, path: list[str], text: str, key: str) -> Recipe:
    method, options = recipe.method, dict(recipe.options)
    if len(path) != 1 or path[0] not in [*declaration_of(method).options, *own_options(method)]:
        known = ", ".join(f"options.{name}" for name in own_options(method))
        raise GrowpruneError(f"--set {key}: unknown option of {method.__name__}. Options are: {known or 'none'}")
    if recipe.counts_iterations and path[0] in ("epochs", "iterations"):  # two ways to say how long
        options = {name: value for name, value in options.items() if name not in ("epochs", "iterations")}
    # its annotation says its type, else its default or current value
    name, hints = path[0], get_type_hints(method)
    if name in hints:
        hint: Any = hints[name]
    elif name == "epochs":  # which stand for iterations
        hint = hints.get("iterations", int)
    else:
        values = (declaration_of(method).options[name].default, recipe.options.get(name))
        hint = next((type(value) for value in values if isinstance(value, bool | int | float | str)), object)
    return replace(recipe, options={**options, name: convert(text, hint, key)})


def convert(text: str, hint: Any, key: str) -> Any:
    """Convert a string to the type of a field. It is read as JSON, as a Python number, or as it is.

    >>> convert(".9", float, "sparsity"), convert("true", bool, "restart"), convert('["a"]', tuple[str, ...], "x")
    (0.9, True, ('a',))
    """
    for reading in [text] if hint is str else [*_readings(text), text]:
        with contextlib.suppress(TypeError):
            return _fit(reading, hint)
    raise GrowpruneError(f"--set {key} must be {_say(hint)}, got {shorten(text, MAX_VALUE)}")


def _readings(text: str) -> Iterator[Any]:
    with contextlib.suppress(ValueError, RecursionError):
        yield json.loads(text, parse_constant=_refuse)
    with contextlib.suppress(ValueError):
        yield int(text)
    with contextlib.suppress(ValueError):
        if math.isfinite(number := float(text)):  # "nan" and "inf" are names to Python, and more likely slips
            yield number


def _refuse(name: str) -> NoReturn:
    raise GrowpruneError(name)  # NaN or Infinity, which are no JSON


def _fit(value: Any, hint: Any) -> Any:
    """Return a value as the type of a field. Raise TypeError if it has another one."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for argument in arguments:
            with contextlib.suppress(TypeError):
                return _fit(value, argument)
    elif origin is Literal:
        if value in arguments:
            return value
    elif origin is tuple:
        if isinstance(value, list):
            hints = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
            if len(hints) == len(value):
                return tuple(map(_fit, value, hints))
    elif hint is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) < 1e300:
            return float(value)
    # bool is an int to isinstance, but 1 is not a switch and true is not a count
    elif hint is object or (isinstance(value, hint) and (hint is bool) == isinstance(value, bool)):
        return value
    raise TypeError


def _say(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_say(argument) for argument in get_args(hint))
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", types.NoneType: "null"}
    names[dict] = 'a JSON object, such as {"steps": 4}'
    return names.get(hint, 'a list, such as ["a", "b"]')
