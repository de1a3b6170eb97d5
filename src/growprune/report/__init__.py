"""One page about one run or many, for someone who never saw the code; it opens offline.

    groups.py     which runs are put together, and which are the same but for their seed
    schedule.py   \\
    over_time.py   \\  one file for each group of charts; a chart is a value (chart.py)
    by_layer.py    /
    frontier.py   /
    tables.py     results in numbers; words.py: what is said in words, the commands among it
    page.py       puts all together; page.css and page.js go into the page
"""

from growprune.report.page import write_page
from growprune.report.words import notes

__all__ = ["notes", "write_page"]
