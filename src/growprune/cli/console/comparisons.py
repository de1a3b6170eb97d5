"""What `growprune compare` shows: a line for each run that ends, and the table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import JustifyMethod
from rich.table import Table

from growprune.cli.console import err, print_json
from growprune.cli.console import out as console
from growprune.compare.jobs import Job
from growprune.compare.table import COST, QUALITY, Comparison, TableRow, cost_cells, is_off, quality_cells
from growprune.compare.working import carry_out as work
from growprune.engine.metric import in_full


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
    _say(f"test {comparison.metric}{_terms(comparison)}: mean ± deviation over seeds; differences ± standard error")
    names, cells = _names(comparison.rows), [quality_cells(row) for row in comparison.rows]
    heads = [head for head in QUALITY[2:] if not _is_plain(head, {each[head] for each in cells})]
    console.print(_table(heads, names, cells))
    _say("cost, as a share of dense:")
    console.print(_table(COST, names, [cost_cells(row) for row in comparison.rows]))
    for line in [*comparison.notes, *comparison.errors]:
        _say(line)
    if out is not None:
        _say(f"in {out}: comparison.json, comparison.csv")


def _terms(comparison: Comparison) -> str:
    """What all rows have in common."""
    sparsities = {row.sparsity for row in comparison.rows if row.has_sparsity}
    epochs = {row.epochs for row in comparison.rows}
    words = [f" on {comparison.base}"] if comparison.base else []
    words += [f" at sparsity {in_full(sparsity)}" for sparsity in sparsities if len(sparsities) == 1]
    words += [f", {each:g} epochs" for each in epochs if each is not None and len(epochs) == 1]
    return "".join(words)


ALIKE = ("epochs", "runs")
"""Columns that are left out where all rows have the same."""


def _is_plain(head: str, values: Collection[str]) -> bool:
    """Whether a column says nothing; runs that are missing are said, even if all rows lack as many."""
    return head in ALIKE and len(values) == 1 and not any("," in value for value in values)


def _say(line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)


def _names(rows: Sequence[TableRow]) -> list[str]:
    """What each row is called: its sparsity too, where there are several, or where it is not what was asked for."""
    is_one = len({row.sparsity for row in rows if row.has_sparsity}) == 1
    plain = [row.name if not row.has_sparsity or (is_one and not is_off(row)) else "" for row in rows]
    return [name or f"{row.name} {quality_cells(row)['sparsity']}" for name, row in zip(plain, rows, strict=True)]


def _table(heads: Sequence[str], names: Sequence[str], rows: Sequence[Mapping[str, str]]) -> Table:
    """Numbers are shown whole; where there is no room, the names of rows go on in the next line."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
    table.add_column("row", overflow="fold")
    for head in heads:
        justify: JustifyMethod = "left" if head == "runs" else "right"
        table.add_column(head.replace(" ", "\n"), justify=justify, no_wrap=True)
    for name, cells in zip(names, rows, strict=True):
        table.add_row(name, *(cells[head] for head in heads))
    return table
