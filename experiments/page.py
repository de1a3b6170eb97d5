"""Tables inside of pages, between two lines that stay."""

from __future__ import annotations


def put(text: str, begin: str, end: str, content: str) -> str:
    """The text with other content between the two lines, each of which it must have once."""
    if text.count(begin) != 1 or text.partition(begin)[2].count(end) != 1:
        raise ValueError(f"the page must have the lines {begin.strip()} and {end.strip()} once each")
    before, _, rest = text.partition(begin)
    return before + begin + content + end + rest.partition(end)[2]
