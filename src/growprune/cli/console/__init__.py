"""What the command line shows: tables, and progress (bars on a terminal, plain lines elsewhere)."""

from growprune.cli.console.files import show_file
from growprune.cli.console.health import show_findings
from growprune.cli.console.plans import plan_content, show_lists, show_plan
from growprune.cli.console.progress import progress
from growprune.cli.console.runs import run_content, show_comparison, show_result, show_run
from growprune.cli.console.screen import err, out, print_json
from growprune.cli.console.speed import show_bench

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
