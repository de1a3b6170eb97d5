"""Errors in users' own code: their file, the line and the error, without our stack."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

from growprune.errors import PACKAGE, shorten

MAX_PLACES = 4
"""Maximum number of lines of users' code to show; the innermost ones."""


def failure_in_users_code(error: Exception) -> str:
    """The message for an error that came through users' code. Empty if no user code is in the traceback."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        places = [traceback.FrameSummary(error.filename, error.lineno, "<module>", line=error.text)]
        return _shown(places[0], f"SyntaxError: {error.msg}", places)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if _is_users(frame.filename)]
    if not theirs:
        return ""
    innermost = [] if theirs[-1] is frames[-1] else [frames[-1]]
    return _shown(theirs[-1], f"{type(error).__name__}: {error}", theirs[-MAX_PLACES:] + innermost)


def _is_users(file: str) -> bool:
    """True for files outside growprune, the standard library and installed packages."""
    installed = [PACKAGE, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))]
    return not file.startswith("<") and not any(Path(file).is_relative_to(folder) for folder in installed)


def _shown(place: traceback.FrameSummary, error: str, places: list[traceback.FrameSummary]) -> str:
    first = f"{place.filename}, line {place.lineno}: {shorten(' '.join(error.split()))}"
    lines = [f'  File "{p.filename}", line {p.lineno}, in {p.name}\n    {p.line}' for p in places]
    return "\n".join([first, *lines])
