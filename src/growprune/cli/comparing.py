"""The verbs that set runs side by side: report, compare."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import JustifyMethod
from rich.table import Table

from growprune.cli.app import AsJson, Data, Settings, one_line_errors
from growprune.cli.screen import err, print_json
from growprune.cli.screen import out as console
from growprune.cli.stopping import stopping
from growprune.errors import GrowpruneError

if TYPE_CHECKING:
    from growprune.compare import Comparison, Job
    from growprune.compare.table import TableRow

ALIKE = ("epochs", "runs")
"""Columns that are left out where all rows have the same."""


@one_line_errors
def report(
    out: Annotated[Path, typer.Option("-o", "--out", help="The page to write, such as page.html.")],
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, folders of runs, or result.json files.")
    ] = [],  # noqa: B006  typer copies defaults
) -> None:
    """Write one page about runs: schedule, curves, comparison. It opens offline."""
    from growprune.report import notes, write_page
    from growprune.runs import find_runs

    if not runs:
        raise GrowpruneError("report was given no run: give run folders, folders of runs, or result.json files")
    records = find_runs(runs)
    if not any(record.recipe or record.damage for record in records):
        raise GrowpruneError(f"{', '.join(map(str, runs))} holds no run: none has a recipe.json or a result.json")
    write_page(records, out)
    for note in notes(records):
        print(f"growprune: {note}", file=sys.stderr)
    print(f"{out}: {len(records)} runs, {out.stat().st_size / 1e6:.1f} MB")


@one_line_errors
def compare(
    what: Annotated[
        list[str], typer.Argument(metavar="RECIPE | RUN...", help="A recipe with --methods, or folders of runs.")
    ] = [],  # noqa: B006
    methods: Annotated[str, typer.Option(help="Rows: dense,rigl:erk,'gmp until=0.5',...; or all.")] = "",
    sparsities: Annotated[str, typer.Option(help="Fractions of zeros.")] = "0.9",
    seeds: Annotated[str, typer.Option(help="Seeds.")] = "0,1,2",
    epochs: Annotated[int, typer.Option(min=0, help="Of each run; those of the recipe if not given.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Where runs and tables go.")] = None,
    data: Data = "",
    settings: Settings = [],  # noqa: B006
    budget: Annotated[str, typer.Option(help="What is equal: epochs, flops, or the paper's ratio: paper.")] = "epochs",
    max_epochs: Annotated[int, typer.Option(min=0, help="The most with --budget flops; 5 times --epochs.")] = 0,
    allow: Annotated[list[str], typer.Option(metavar="FIELD", help="What may differ among rows.")] = [],  # noqa: B006
    workers: Annotated[int, typer.Option(min=1, help="How many runs at a time.")] = 1,
    retry: Annotated[bool, typer.Option("--retry", help="Run again what failed.")] = False,
    print_jobs: Annotated[
        bool, typer.Option("--print-jobs", help="Print a command for each run; run nothing.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print markdown, and write comparison.md.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare methods on equal terms, or runs that are there already."""
    from growprune.compare import Request, of_runs

    show = functools.partial(_show, out=out, as_markdown=markdown, as_json=as_json)
    if not methods:
        return show(of_runs([Path(path) for path in what], allow))
    request = Request(what, methods, sparsities, seeds, epochs, out, settings, data, budget, max_epochs, allow)
    jobs = request.jobs()
    if print_jobs:
        return print("".join(f"{job.command}\n" for job in jobs if not job.is_finished), end="")
    with stopping() as should_stop:
        is_done = _carry_out(jobs, workers, should_stop, retry=retry)
    comparison = request.table(jobs)
    show(comparison)
    if not is_done or comparison.errors:
        raise typer.Exit(128 + should_stop.signal if should_stop.signal else 1)
    return None


def _carry_out(jobs: Sequence[Job], workers: int, should_stop: Callable[[], bool], *, retry: bool) -> bool:
    """Run what is not finished, saying of each run how it ended; False if it was asked to stop."""
    from growprune.compare import working

    if retry:
        for job in jobs:
            job.failure.unlink(missing_ok=True)
    done = sum(job.is_finished for job in jobs)
    if done:
        err().print(f"{done} of {len(jobs)} runs were finished before")

    def tell(job: Job, event: str) -> None:
        finished = sum(other.is_finished for other in jobs)
        why = {"failed": f": {job.error}", "in use": " by another process: left to it"}.get(event, "")
        err().print(f"[{finished}/{len(jobs)}] {job.name}: {event}{why}", highlight=False, soft_wrap=True)

    return working.carry_out(jobs, workers=workers, should_stop=should_stop, tell=tell)


def _show(comparison: Comparison, *, out: Path | None, as_markdown: bool, as_json: bool = False) -> None:
    """Show the table, and write it if there is a place for it."""
    from growprune.compare.table import COST, QUALITY

    if out is not None:
        comparison.write(out, with_markdown=as_markdown)
    if as_json:
        print_json(comparison.to_dict())
        return
    if as_markdown:
        print(comparison.to_markdown(), end="")
        return
    _say(f"test {comparison.metric}{comparison.terms}: mean ± deviation over seeds; differences ± standard error")
    names, cells = _names(comparison.rows), [row.quality_cells() for row in comparison.rows]
    heads = [head for head in QUALITY[2:] if not _is_plain(head, {each[head] for each in cells})]
    console().print(_table(heads, names, cells))
    _say("cost, as a share of dense:")
    console().print(_table(COST, names, [row.cost_cells() for row in comparison.rows]))
    for line in [*comparison.notes, *comparison.errors]:
        _say(line)
    if out is not None:
        _say(f"in {out}: comparison.json, comparison.csv")


def _is_plain(head: str, values: Collection[str]) -> bool:
    """Whether a column says nothing; runs that are missing are said, even if all rows lack as many."""
    return head in ALIKE and len(values) == 1 and not any("," in value for value in values)


def _say(line: str) -> None:
    console().print(line, highlight=False, soft_wrap=True)


def _names(rows: Sequence[TableRow]) -> list[str]:
    """What each row is called: its sparsity too, where there are several, or where it is not what was asked for."""
    is_one = len({row.sparsity for row in rows if row.has_sparsity}) == 1
    plain = [row.name if not row.has_sparsity or (is_one and not row.is_off) else "" for row in rows]
    return [name or f"{row.name} {row.quality_cells()['sparsity']}" for name, row in zip(plain, rows, strict=True)]


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
