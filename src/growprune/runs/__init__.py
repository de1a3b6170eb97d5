"""Reads run folders, and defines rows of runs and what they are compared with.

    result.py       the schema of result.json, shared by the engine that writes it and all readers
    record.py       a run and its state: finished, unfinished, failed or damaged
    reading.py      finds run folders and results, and checks their content
    packed.py       one file with the results of many runs
    comparable.py   which runs can be in one table, and how they differ
    table.py        rows of a table: their names, the reference, the baseline
    metric.py       comparing scores

`compare`, `report`, the command line and the scripts of experiments/ read runs only through this package.
"""

from growprune.runs.reading import find_runs, read_run
from growprune.runs.record import Record
from growprune.runs.result import Result
from growprune.runs.table import RunRow, rows_of

__all__ = ["Record", "Result", "RunRow", "find_runs", "read_run", "rows_of"]
