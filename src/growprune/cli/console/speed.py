"""What `growprune bench` measured."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from growprune.cli.console.screen import out
from growprune.deployment.bench import Timing


def show_bench(timings: Sequence[Timing]) -> None:
    """A row an engine, and how the deployed model compares with the fastest of the others."""
    table = Table()
    table.add_column("engine")
    for name in ("ms", "spread", "error"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("", overflow="fold")
    for one in timings:
        if one.ms is None:
            table.add_row(one.engine, "-", "-", "-", f"not measured: {one.why}")
        else:
            table.add_row(one.engine, f"{one.ms:.3f}", f"{one.spread or 0:.0%}", f"{one.error or 0:.1e}", "")
    out.print(table, highlight=False)
    out.print(conclusion(timings), soft_wrap=True, highlight=False)


def conclusion(timings: Sequence[Timing]) -> str:
    """Only of what was measured."""
    ours = next((t for t in timings if t.engine == "deployed" and t.ms is not None), None)
    others = [t for t in timings if t.engine != "deployed" and t.ms is not None]
    missing = [t.engine for t in timings if t.ms is None]
    left_out = f"; {', '.join(missing)} not measured" if missing else ""
    if ours is None or not others or ours.ms is None:
        return f"nothing to compare{left_out}"
    best = min(others, key=lambda t: t.ms or 0)
    noise = max(t.spread or 0 for t in (ours, best))
    assert best.ms is not None
    ratio = best.ms / ours.ms
    return f"{ratio:.2f} times as fast as the best of the others, {best.engine} (spread {noise:.0%}){left_out}"
