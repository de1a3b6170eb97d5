"""What `growprune compare` shows: a line for each run that ends, and the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import JustifyMethod
from rich.table import Table

from growprune.compare.jobs import Job
from growprune.compare.table import COST, QUALITY, Comparison, TableRow, cost_cells, quality_cells
from growprune.compare.working import carry_out as work
from growprune.console import err, print_json
from growprune.console import out as console


def carry_out(jobs: Sequence[Job], workers: int, should_stop: Callable[[], bool], *, retry: bool) -> bool:
    """Run what is not finished, saying of each run how it ended; False if it was asked to stop."""
    if retry:
        for job in jobs:
            job.failure.unlink(missing_ok=True)
    done = sum(job.is_finished for job in jobs)
    if done:
        err.print(f"{done} of {len(jobs)} runs were finished before")

    def tell(job: Job, event: str) -> None:
        finished = sum(other.is_finished for other in jobs)
        why = {"failed": f": {job.error}", "in use": " by another process: left to it"}.get(event, "")
        err.print(f"[{finished}/{len(jobs)}] {job.name}: {event}{why}", highlight=False, soft_wrap=True)

    return work(jobs, workers=workers, should_stop=should_stop, tell=tell)


def print_jobs(jobs: Sequence[Job]) -> None:
    """A line a run that is not finished."""
    for job in jobs:
        if not job.is_finished:
            print(job.command)


def show(comparison: Comparison, *, out: Path | None, as_markdown: bool, as_json: bool = False) -> None:
    """Show the table, and write it if there is a place for it."""
    if out is not None:
        comparison.write(out, with_markdown=as_markdown)
    if as_json:
        print_json(comparison.to_dict())
        return
    if as_markdown:
        print(comparison.to_markdown(), end="")
        return
    where = f" on {comparison.base}" if comparison.base else ""
    _say(f"test {comparison.metric}{where}: mean ± deviation over seeds; differences ± standard error")
    console.print(_table(QUALITY_SHOWN, [_named(row) | quality_cells(row) for row in comparison.rows]))
    _say("cost, as a share of dense:")
    console.print(_table(("row", *COST), [_named(row) | cost_cells(row) for row in comparison.rows]))
    for line in [*comparison.notes, *comparison.errors]:
        _say(line)
    if out is not None:
        _say(f"in {out}: comparison.json, comparison.csv")


QUALITY_SHOWN = tuple(name for name in QUALITY if name != "sparsity")


def _say(line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)


def _named(row: TableRow) -> dict[str, str]:
    """The row and its sparsity in one, so that the table fits a terminal."""
    sparsity = quality_cells(row)["sparsity"] if row.sparsity else ""
    return {"title": f"{row.name} {sparsity}".strip()}


def _table(heads: Sequence[str], rows: Sequence[Mapping[str, str]]) -> Table:
    """Numbers are shown whole; where there is no room, the names of rows go on in the next line."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
    for head in heads:
        is_text = head in ("row", "runs")
        justify: JustifyMethod = "left" if is_text else "right"
        table.add_column(head.replace(" ", "\n"), justify=justify, no_wrap=head != "row", overflow="fold")
    for cells in rows:
        table.add_row(cells["title"], *(cells[head] for head in heads[1:]))
    return table
