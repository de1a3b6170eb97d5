"""Warnings that name the line of the user's code they are about, however deep in ours they arise."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType

PACKAGE = Path(__file__).parent


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
    """The first frame outside of both packages; torch's are passed too, since it calls our hooks."""
    torch = sys.modules.get("torch")
    packages = {PACKAGE} if torch is None else {PACKAGE, Path(str(torch.__file__)).parent}
    while frame.f_back is not None and not packages.isdisjoint(Path(frame.f_code.co_filename).parents):
        frame = frame.f_back
    return frame
