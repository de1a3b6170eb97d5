"""Reads run folders, and defines rows of runs and what they are compared with.

    result.py   the schema of result.json, shared by the engine that writes it and all readers; comparing scores
    record.py   a run and its state (finished, unfinished, failed or damaged); finding runs
    table.py    rows of a table: which runs can be in one, their names, the reference, the baseline, their tuning
    comparison.py   the table of some rows, with what they are compared with

`compare`, `report`, the command line and the scripts of experiments/ read runs only through this package.
"""

from growprune.runs.record import Record, find_runs, read_run
from growprune.runs.result import Result
from growprune.runs.table import RunRow, rows_of

__all__ = ["Record", "Result", "RunRow", "find_runs", "read_run", "rows_of"]
