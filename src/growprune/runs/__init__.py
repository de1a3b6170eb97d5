"""Reads run folders, and defines which runs are comparable.

    record.py       a run and its state: finished, unfinished, failed or damaged
    reading.py      finds run folders and results, and checks their content
    comparable.py   which runs can be in one table, how they differ, and the names of rows

`compare`, `report`, the command line and the scripts of experiments/ read runs only through this package.
"""

from growprune.runs.reading import find_runs, read_run
from growprune.runs.record import Record

__all__ = ["Record", "find_runs", "read_run"]
