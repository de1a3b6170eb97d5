"""Errors and warnings for users: what was given, what is allowed and what to do. Any other error is a bug."""

from __future__ import annotations

import importlib
import re
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent

MAX_VALUE = 200
"""The most characters of a user's value that a message quotes. Longer than any path that one would copy."""

_QUOTED = re.compile(rf"(?<![^\s(\[{{=])('[^']{{{MAX_VALUE},}}'|\"[^\"]{{{MAX_VALUE},}}\")")
"""Match a long value in quotes. An apostrophe within a word does not open a quote."""


def is_users_file(file: str) -> bool:
    """True for a file outside growprune, the standard library and installed packages."""
    installed = [PACKAGE, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))]
    path = Path(file)
    is_installed = {"site-packages", "dist-packages"} & set(path.parts) or any(map(path.is_relative_to, installed))
    return not file.startswith("<") and not is_installed


class GrowpruneError(ValueError):
    """Raised for invalid input, with what is allowed and what to do. The command line shows it as one line."""

    def __str__(self) -> str:
        return shorten(_QUOTED.sub(lambda quoted: shorten(quoted[0], MAX_VALUE), super().__str__()))


def shorten(text: str, limit: int = 1000) -> str:
    """Cut the middle out of a long string. The end of a message, which says what is allowed, stays readable.

    >>> shorten("sparsity is 0000000000000000, but must be below 1", limit=40)
    'sparsity is 00000 ... t must be below 1'
    """
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def first_line(error: BaseException, limit: int = 160) -> str:
    """Return the class of an error and the first line of its message, cut to `limit` characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else ''}"[:limit]
    return "".join(character if character.isprintable() else " " for character in text)


def how_to_install(extra: str) -> str:
    """Say how to install an extra. growprune is on no package index."""
    return f"run pip install '.[{extra}]' in a copy of its repository"


def need(module: str, extra: str, why: str) -> Any:
    """Import an optional dependency, or raise an error that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise GrowpruneError(f"{why}: {how_to_install(extra)} ({error})") from error


def warn(message: str) -> None:
    """Warn as `warnings.warn` does, at the innermost line outside growprune and torch."""
    torch = sys.modules.get("torch")  # it calls our hooks
    packages = {PACKAGE} if torch is None else {PACKAGE, Path(str(torch.__file__)).parent}
    frame = sys._getframe(1)
    while frame.f_back is not None and not packages.isdisjoint(Path(frame.f_code.co_filename).parents):
        frame = frame.f_back
    scope = frame.f_globals
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=scope.get("__name__", "<unknown>"),
        registry=scope.setdefault("__warningregistry__", {}),
    )
