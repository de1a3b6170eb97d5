"""Runs, read from their folders: one reader, and one definition of which runs are comparable.

    record.py       what is known of a run, whatever became of it
    reading.py      finds run folders and results, and checks what they hold
    comparable.py   which runs may stand in one table, what varies among them, and what a row is called

`compare`, `report`, the command line and the scripts of experiments/ read runs with it, and in no other way.
"""

from growprune.runs.reading import find_runs, read_run
from growprune.runs.record import Record

__all__ = ["Record", "find_runs", "read_run"]
