"""What `growprune compare` shows: a line for each run that ends, and the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.table import Table

from growprune.compare.jobs import Job
from growprune.compare.table import COST, QUALITY, Comparison, cost_cells, quality_cells
from growprune.compare.working import carry_out as work
from growprune.console import err
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


def show(comparison: Comparison, *, out: Path | None, as_markdown: bool) -> None:
    """Show the table, and write it if there is a place for it."""
    if out is not None:
        comparison.write(out, with_markdown=as_markdown)
    if as_markdown:
        print(comparison.to_markdown(), end="")
        return
    where = f" on {comparison.base}" if comparison.base else ""
    title = f"test {comparison.metric}{where}: mean ± deviation over seeds; differences ± standard error"
    console.print(_table(title, QUALITY, [quality_cells(row) for row in comparison.rows]))
    cost = [{"row": _place(row.name, row.sparsity), **cost_cells(row)} for row in comparison.rows]
    console.print(_table("cost: shares are of dense", ("row", *COST), cost))
    for line in [*comparison.notes, *comparison.errors]:
        console.print(line, highlight=False, soft_wrap=True)
    if out is not None:
        console.print(f"in {out}: comparison.json, comparison.csv", highlight=False, soft_wrap=True)


def _place(name: str, sparsity: float) -> str:
    return f"{name} {sparsity:g}" if sparsity else name


def _table(title: str, heads: Sequence[str], rows: Sequence[Mapping[str, str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for head in heads:
        if head in ("row", "runs"):
            table.add_column(head, overflow="fold", min_width=10)
        else:
            table.add_column(head, justify="right")
    for cells in rows:
        table.add_row(*(cells[head] for head in heads))
    return table
