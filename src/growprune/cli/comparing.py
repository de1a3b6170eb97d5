"""The verbs that set runs side by side: report, compare."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Annotated

import typer

from growprune.cli.app import AsJson, Data, Settings, one_line_errors
from growprune.cli.stopping import stopping


@one_line_errors
def report(
    out: Annotated[Path, typer.Option("-o", "--out", help="The page to write, such as page.html.")],
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, folders of runs, or result.json files.")
    ] = [],  # noqa: B006  typer copies defaults
) -> None:
    """Write one page about runs: schedule, curves, comparison. It opens offline."""
    from growprune.report import find_runs, notes, write_page

    records = find_runs(runs)
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
    from growprune.cli.console import comparisons as console_compare
    from growprune.compare import Request, of_runs

    show = functools.partial(console_compare.show, out=out, as_markdown=markdown, as_json=as_json)
    if not methods:
        return show(of_runs([Path(path) for path in what], allow))
    request = Request(what, methods, sparsities, seeds, epochs, out, settings, data, budget, max_epochs, allow)
    jobs = request.jobs()
    if print_jobs:
        return console_compare.print_jobs(jobs)
    with stopping() as should_stop:
        is_done = console_compare.carry_out(jobs, workers, should_stop, retry=retry)
    comparison = request.table(jobs)
    show(comparison)
    if not is_done or comparison.num_failed:
        raise typer.Exit(128 + should_stop.signal if should_stop.signal else 1)
    return None
