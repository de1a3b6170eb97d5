"""The verbs that compare runs: report, compare."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import JustifyMethod
from rich.table import Table

from growprune.cli.app import AsJson, Data, Settings, one_line_errors, stopping
from growprune.cli.screen import duration, print_json, remark, say
from growprune.cli.screen import out as console
from growprune.errors import GrowpruneError

if TYPE_CHECKING:
    from growprune.compare import Comparison, Job, Request

SHORT = {"training": "train", "inference": "infer", "average": "mean"}
"""Words of headings that are shorter on the screen, so that names of rows fit into 80 columns."""
OPERATIONS, WIDE = "inference FLOPs", 100
"""On screens of fewer columns, operations are among the costs, and not beside the score."""
ALIKE = ("epochs", "runs")
"""Columns that are hidden if all rows have the same value."""


@one_line_errors
def report(
    out: Annotated[Path, typer.Option("-o", "--out", help="HTML file to write, such as page.html. Follows links.")],
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, folders of runs, or result.json files.")
    ] = [],  # noqa: B006  typer copies defaults
) -> None:
    """Write one HTML page about runs that opens offline.

    It shows training curves and a comparison.
    """
    from growprune.report import notes, write_page
    from growprune.runs import find_runs

    if not runs:
        raise GrowpruneError("report needs at least one RUN: a run folder, a folder of runs, or a result.json file")
    records = find_runs(runs)
    if not any(record.recipe or record.damage for record in records):
        raise GrowpruneError(f"no run found in {', '.join(map(str, runs))}: no recipe.json or result.json there")
    write_page(records, out)
    for note in notes(records):
        print(f"growprune: {note}", file=sys.stderr)
    print(f"{out}: {len(records)} runs, {out.stat().st_size / 1e6:.1f} MB")


@one_line_errors
def compare(
    what: Annotated[
        list[str], typer.Argument(metavar="RECIPE | RUN...", help="A recipe (with --methods), or finished run folders.")
    ] = [],  # noqa: B006
    methods: Annotated[str, typer.Option(help="Rows of the table: dense,rigl:erk,'gmp until=0.5',... or all.")] = "",
    sparsities: Annotated[str, typer.Option(help="Sparsities (fractions of zeros), comma-separated.")] = "0.9",
    seeds: Annotated[str, typer.Option(help="Seeds, comma-separated.")] = "0,1,2",
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of each run. Default: those of the recipe.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write runs and tables to.")] = None,
    data: Data = "",
    settings: Settings = [],  # noqa: B006
    budget: Annotated[str, typer.Option(help="Equal epochs, equal flops, or paper (GaP: epochs x 4).")] = "epochs",
    max_epochs: Annotated[int, typer.Option(min=0, help="Epoch limit of --budget flops. 0: 5 times --epochs.")] = 0,
    tune: Annotated[
        list[str],
        typer.Option(metavar="KEY=VALUE,...", help="Tune each row over this grid. x2 means twice the recipe's value."),
    ] = [],  # noqa: B006
    controls: Annotated[
        bool, typer.Option("--controls", help="Add rows that never grow, for methods that have such controls.")
    ] = False,
    allow: Annotated[list[str], typer.Option(metavar="FIELD", help="Recipe field that may differ between rows.")] = [],  # noqa: B006
    workers: Annotated[int, typer.Option(min=1, help="Number of runs at a time.")] = 1,
    retry: Annotated[bool, typer.Option("--retry", help="Run failed runs again.")] = False,
    print_jobs: Annotated[bool, typer.Option("--print-jobs", help="Print one command per run, train nothing.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, and write comparison.md.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare methods on equal terms: train them, or use finished runs.

    The exit code is 1 if a run of the table is not finished.
    """
    from growprune.compare import Request, of_runs

    show = functools.partial(_show, out=out, as_markdown=markdown, as_json=as_json)
    if not methods and (tune or controls):
        option = "--tune" if tune else "--controls"
        raise GrowpruneError(f"{option} needs a recipe and --methods, such as: digits/dense --methods dense,gmp")
    if not methods:
        comparison = of_runs([Path(path) for path in what], allow)
        show(comparison)
        raise typer.Exit(1 if comparison.errors else 0)
    request = Request.parse(
        *(what, methods, sparsities, seeds, epochs or 0, out, settings, data, budget, max_epochs, allow, tune),
        with_controls=controls,
    )
    with stopping() as should_stop, request.locked():
        jobs = _next_jobs(request)
        if print_jobs:
            print("".join(f"{job.command}\n" for job in jobs if not job.is_finished), end="")
            if not request.is_tuned():
                more = "When they are done, run this command again to get the remaining seeds of each row."
                remark(f"These runs tune. {more}")
            return
        is_done = _carry_out(jobs, workers, should_stop, retry=retry)
        if is_done and tune:
            jobs = _next_jobs(request)  # the other seeds of each row's choice are known now
            is_done = _carry_out(jobs, workers, should_stop)
        comparison = request.table(jobs)
        show(comparison)
    if not is_done or comparison.errors or not all(job.is_finished for job in jobs):
        raise typer.Exit(128 + should_stop.signal if should_stop.signal else 1)


def _next_jobs(request: Request) -> list[Job]:
    """The runs that are known so far, ready to be started. Say if some run again because code changed."""
    jobs = request.jobs()
    for line in request.prepare(jobs):
        remark(line)
    request.write_choices()
    return jobs


def _carry_out(jobs: Sequence[Job], workers: int, should_stop: Callable[[], bool], *, retry: bool = False) -> bool:
    """Train all unfinished runs and print how they go. Return False if interrupted."""
    from growprune.compare.jobs import Working, last_epoch
    from growprune.runs import read_run

    if retry:
        for job in jobs:
            job.failure.unlink(missing_ok=True)
    done = sum(job.is_finished for job in jobs)
    if done:
        remark(f"{done} of {len(jobs)} runs are finished already")

    def tell(job: Job, event: str) -> None:
        said = {"failed": f"failed: {job.error}", "in use": "in use by another process, skipped"}.get(event, event)
        if event == "finished":
            run = read_run(job.folder)
            scores = {"validation": run.validation, "test": run.test}
            known = [f"{name} {score:.4g}" for name, score in scores.items() if score is not None]
            said += f", {run.metric.name}: {', '.join(known)}" if known else ""
        if event == "progress":
            epoch: Mapping[str, Any] = last_epoch(job)
            score = (epoch.get("validation") or {}).get(epoch.get("metric"))
            said = f"epoch {epoch.get('epoch', 0)} of {job.epochs:g}"
            said += "" if score is None else f", validation {epoch['metric']} {score:.4g}"
        if event != "started":
            left = working.seconds_left
            said += f"; {duration(working.seconds)} elapsed" + ("" if left is None else f", {duration(left)} left")
        remark(f"[{sum(other.is_finished for other in jobs)}/{len(jobs)}] {job.name}: {said}")

    working = Working(jobs, workers, tell)
    return working.carry_out(should_stop)


def _show(comparison: Comparison, *, out: Path | None, as_markdown: bool, as_json: bool = False) -> None:
    """Print the table, and write it to `out` if given."""
    from growprune.runs.comparison import COST, QUALITY
    from growprune.runs.table import HEAD, cells_of

    if out is not None:
        comparison.write(out, with_markdown=as_markdown)
    if as_json:
        print_json(comparison.to_dict())
        return
    if as_markdown:
        print(comparison.to_markdown(), end="")
        return
    say(
        f"test {comparison.metric.name or 'results'}{comparison.terms}: mean ± standard deviation over seeds; "
        f"differences ± standard error"
    )
    rows = comparison.rows
    cells = [comparison.cells(row) for row in rows]
    # names have the sparsity if there are several, or if the row missed the requested one
    is_one = len({row.sparsity for row in rows if row.has_sparsity}) == 1
    plain = [row.name if not row.has_sparsity or (is_one and not row.is_off) else "" for row in rows]
    names = [name or f"{row.name} {cell['sparsity']}" for name, row, cell in zip(plain, rows, cells, strict=True)]
    alike = {head for head in ALIKE if len(values := {each[head] for each in cells}) == 1 and "," not in min(values)}
    heads = [head for head in QUALITY[2:] if head not in alike]  # missing runs are always shown
    costs = [*COST]
    if console().width < WIDE:
        heads.remove(OPERATIONS)
        costs.insert(1, OPERATIONS)
    console().print(_table(heads, names, cells))
    say("cost, as a fraction of dense:")
    console().print(_table(costs, names, cells))
    if comparison.tunings:
        say("tuning, chosen by the validation metric:")
        table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
        for number, head in enumerate(HEAD):
            table.add_column(head.replace(" ", "\n"), justify="left" if number < 2 else "right", overflow="fold")
        for tuning in comparison.tunings:
            table.add_row(*cells_of(tuning))
        console().print(table)
    for line in [*comparison.notes, *comparison.errors]:
        say(line)
    if out is not None:
        say(f"written to {out}: comparison.json")


def _table(heads: Sequence[str], names: Sequence[str], rows: Sequence[Mapping[str, str]]) -> Table:
    """A table that wraps the names of rows if the screen is narrow, but never numbers."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1), collapse_padding=True)
    table.add_column("row", overflow="fold")
    for head in heads:
        justify: JustifyMethod = "left" if head == "runs" else "right"
        shown = "\n".join(SHORT.get(word, word) for word in head.split())
        table.add_column(shown, justify=justify, no_wrap=True)
    for name, cells in zip(names, rows, strict=True):
        table.add_row(name, *(cells[head] for head in heads))
    return table
