"""Consoles, tables and number formats of the command line, and the progress of a run.

On a terminal progress is drawn in place, and the final state stays on the screen:

digits/cyclic-90 seed 0 ━━━━━━━━━━━━━━━╺━━━━━━  71% 0:00:09 elapsed, 0:00:04 left
  phase 7 of 10: prune S1 to 0.9, grow S2 to dense
  epoch 25   loss 0.0312   accuracy 97.22   density 0.2154   lr 0.042
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from growprune.engine.observers import Event


def out() -> Console:
    """Console for stdout. Made anew each time, because width and rank are not known at import."""
    return Console(quiet=not _is_first(), markup=False, emoji=False)  # strings are shown as they are


def err() -> Console:
    """Console for stderr."""
    return Console(stderr=True, quiet=not _is_first(), markup=False, emoji=False)


def say(text: str) -> None:
    """Print text to stdout as it is: neither wrapped nor coloured."""
    out().print(text, soft_wrap=True, highlight=False)


def remark(text: str) -> None:
    """Print text to stderr as it is."""
    err().print(text, soft_wrap=True, highlight=False)


def _is_first() -> bool:
    """True for the process that prints: rank 0 under torchrun."""
    return os.environ.get("RANK", "0") == "0"


def print_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object to stdout."""
    if _is_first():
        print(json.dumps(content, indent=2))


def new_table(*columns: str, text: str) -> Table:
    """A table that wraps the column `text` if the screen is narrow, but never numbers."""
    table = Table()
    for name in columns:
        if name == text:
            table.add_column(name, min_width=12, overflow="fold")
        else:
            table.add_column(name, no_wrap=True, justify="right")
    return table


def size(num_bytes: float) -> str:
    """Format a number of bytes with a unit.
    >>> [size(count) for count in (999, 4096, 1.5 * 2**30)]
    ['999 B', '4.0 KiB', '1.5 GiB']
    """
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    power = next((p for p in range(1, 4) if num_bytes < 1024 ** (p + 1)), 4)
    return f"{num_bytes / 1024**power:.1f} {'_KMGT'[power]}iB"


def metrics_text(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def show_result(result: dict[str, Any], folder: Path) -> None:
    total = result["sparsity"]["totals"]
    say(f"test: {metrics_text(result['test'])}")
    if result["best"]:
        best = result["best"]
        say(f"best by validation: stage {best['stage']}, test: {metrics_text(best['test'])}")
    say(f"alive: {total['alive']:,} of {total['prunable']:,} prunable weights")
    say(f"file: {result['file_bytes']:,} bytes, {folder / 'model.safetensors'}")


@contextmanager
def progress(title: str = "") -> Iterator[Callable[[Event], None]]:
    """Yield the listener that shows the progress of a run."""
    console = err()
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda event: _show_line(title, event)
        return
    drawing = Drawing(title, console)
    with Live(get_renderable=drawing.draw, console=console, refresh_per_second=5):
        yield drawing.listen


def _show_line(title: str, event: Event) -> None:
    match event:
        case {"event": "phase"} if event["epochs"] or event["index"] in (0, event["last"]):
            length = f"{event['epochs']} epochs" if event["epochs"] else f"{event['iterations']} iterations"
            line = f"stage {event['stage']}: {event['edits']}; {event['alive']:,} alive, {length}"
        case {"event": "epoch"}:
            validation = f", {metrics_text(event['validation'])} (validation)" if "validation" in event else ""
            line = f"epoch {event['epoch']}: density {event['density']:.3f}, loss {event['loss']:.4f}{validation}"
        case {"event": "warning"}:
            line = f"warning: {event['message']}"
        case {"event": "resumed"}:
            line = f"resumed from checkpoint {event['number']}"
        case _:
            return
    remark(f"{title}: {line}" if title else line)


class Drawing:
    """The state of a run, drawn on a terminal.

    Args:
        console: the console to draw on.
        clock: returns seconds.
    """

    def __init__(self, title: str, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        short = Column(no_wrap=True, overflow="ellipsis", max_width=max(1, console.width - REST))
        self._bar = Progress(
            TextColumn("{task.description}", markup=False, table_column=short),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            expand=True,
            get_time=clock,
            speed_estimate_period=math.inf,
        )
        self._task = self._bar.add_task(title, total=None)
        self._phase, self._remark = "", ""
        self._figures: dict[str, str] = {}

    def listen(self, event: Event) -> None:
        if "run_done" in event:  # rich leaves the first call out of the pace, which in a resumed run did nothing
            self._bar.update(self._task, total=event["run_iterations"], completed=event["run_done"])
        match event["event"]:
            case "phase":
                branch = "" if event["branch"] is None else f", branch {event['branch']}"
                self._phase = f"phase {event['index'] + 1} of {event['last'] + 1}{branch}: {event['edits']}"
                self._figures |= _figures(event)
                self._remark = ""
            case "iteration":
                self._figures |= _figures(event)
            case "epoch":
                self._figures |= {"epoch": f"epoch {event['epoch']}", **_figures(event)}
            case "warning":
                self._console.print(f"warning: {event['message']}", style="yellow")
            case "resumed":
                self._remark = f"resumed from checkpoint {event['number']}"
            case "interrupted" | "failed":
                self._remark = event["event"]
            case "finished":
                self._phase = ""
                self._bar.update(self._task, completed=self._bar.tasks[0].total)

    def draw(self) -> RenderableType:
        figures = "  ".join(self._figures[name] for name in ORDER if name in self._figures)
        phase = f"{self._phase}   {self._remark}".rstrip() if self._phase else ""
        lines = [Text(f"  {line}", no_wrap=True, overflow="ellipsis") for line in (phase, figures) if line]
        return Group(self._bar.get_renderable(), *lines)


REST = 48
"""The columns of a progress bar of 12 columns, and what stands behind it. Longer titles are cut."""
ORDER = ("epoch", "loss", "metric", "density", "lr")


def _figures(event: Event) -> dict[str, str]:
    found = {}
    if event.get("loss") is not None:
        found["loss"] = f"loss {event['loss']:.4f}"
    if event.get("lr") is not None:
        found["lr"] = f"lr {event['lr']:.3g}"
    if "density" in event:
        found["density"] = f"density {event['density']:.4f}"
    if event.get("validation"):
        found["metric"] = f"validation {event['metric']} {event['validation'][event['metric']]:.4g}"
    return found


def duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds, as rich does."""
    return str(timedelta(seconds=round(seconds)))
