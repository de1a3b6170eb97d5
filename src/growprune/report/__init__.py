"""One HTML page about one or more runs, for readers who do not know the code. It opens offline.

groups.py   groups comparable runs, and runs that differ only by seed
charts.py   the charts, as values
words.py    sentences and commands
page.py     tables, and the whole page; page.css and page.js are included in it
"""

from growprune.report.page import write_page
from growprune.report.words import notes

__all__ = ["notes", "write_page"]
