"""What the command line shows: tables, and progress (bars on a terminal, plain lines elsewhere).

What only some verbs show is loaded when first used, so that `growprune train` imports nothing of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from growprune.cli.console.progress import progress
from growprune.cli.console.screen import err, out, print_json

if TYPE_CHECKING:
    from growprune.cli.console.files import show_file
    from growprune.cli.console.health import show_findings
    from growprune.cli.console.plans import plan_content, show_lists, show_plan
    from growprune.cli.console.runs import run_content, show_comparison, show_result, show_run
    from growprune.cli.console.speed import show_bench

_HOMES = {
    "files": ("show_file",),
    "health": ("show_findings",),
    "plans": ("plan_content", "show_lists", "show_plan"),
    "runs": ("run_content", "show_comparison", "show_result", "show_run"),
    "speed": ("show_bench",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "err",
    "out",
    "plan_content",
    "print_json",
    "progress",
    "run_content",
    "show_bench",
    "show_comparison",
    "show_file",
    "show_findings",
    "show_lists",
    "show_plan",
    "show_result",
    "show_run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
