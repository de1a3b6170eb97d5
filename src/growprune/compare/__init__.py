"""Compares methods on equal terms: `Request.parse(...)` describes the runs, and makes the table of their results
(`Comparison`, in `growprune.runs`).

    rows.py         the rows and the grid, as typed; how long each row trains, and how wide small dense models are
    request.py      every run, with its recipe
    jobs.py         a run: its folder and its state; training several at a time

`of_runs` makes the table of existing runs. Usage and rules: docs/comparing.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from growprune.compare.jobs import Job
from growprune.compare.request import Request
from growprune.errors import GrowpruneError
from growprune.runs import find_runs
from growprune.runs.comparison import Comparison
from growprune.runs.table import check_rows, rows_of, without_tried

__all__ = ["Comparison", "Job", "Request", "of_runs"]


def of_runs(paths: Sequence[Path], allow: Sequence[str] = ()) -> Comparison:
    """The table of existing runs: run folders, folders of runs, or result.json files."""
    if not (found := without_tried(find_runs(paths))):
        raise GrowpruneError("nothing to compare. Give run folders, or a recipe with --methods")
    if damaged := [run.damage for run in found if run.damage]:
        raise GrowpruneError(damaged[0])
    rows = rows_of(found, allow)
    return Comparison(rows, remarks=check_rows(rows, allow))
