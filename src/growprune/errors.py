"""Errors and warnings for users: what was given, what is allowed, what to do. Any other error is a bug."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = Path(__file__).parent


class GrowpruneError(ValueError):
    """Something given to growprune is invalid. The command line shows it as one line."""

    def __str__(self) -> str:
        return shorten(super().__str__())


def shorten(text: str, limit: int = 1000) -> str:
    """Cut the middle out of a long text, so that the end, which says what is allowed, stays readable.

    >>> shorten("sparsity is 0000000000000000, but must be below 1", limit=40)
    'sparsity is 00000 ... t must be below 1'
    """
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def need(module: str, extra: str, why: str) -> Any:
    """A module that comes with an extra of growprune, or one line about how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise GrowpruneError(f"{why}: pip install 'growprune[{extra}]' ({error})") from error


def warn(message: str) -> None:
    """Like `warnings.warn`, at the innermost line that is neither growprune's nor torch's."""
    frame = _users_frame(sys._getframe(1))
    scope = frame.f_globals
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=scope.get("__name__", "<unknown>"),
        registry=scope.setdefault("__warningregistry__", {}),
    )


def _users_frame(frame: FrameType) -> FrameType:
    """The first frame outside of both packages. Torch's frames are skipped because torch calls our hooks."""
    torch = sys.modules.get("torch")
    packages = {PACKAGE} if torch is None else {PACKAGE, Path(str(torch.__file__)).parent}
    while frame.f_back is not None and not packages.isdisjoint(Path(frame.f_code.co_filename).parents):
        frame = frame.f_back
    return frame
