"""Keep torch.compile out of our hooks: it may compile an optimizer's step, and with it whatever the step calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Hook = TypeVar("Hook", bound=Callable[..., Any])

REASON = "growprune masks gradients and edits masks around each optimizer step: compile with fullgraph=False"


def uncompiled(hook: Hook) -> Hook:
    """Wrap a hook so that torch.compile breaks the graph at it.

    Use it where a hook is registered, and not as a decorator: it loads the compiler, as every optimizer does.
    """
    return torch.compiler.disable(hook, reason=REASON)  # type: ignore[no-any-return,no-untyped-call]
