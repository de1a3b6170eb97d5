"""Tables inside of pages, between two lines that stay."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def put(text: str, begin: str, end: str, content: str) -> str:
    """The text with other content between the two lines, each of which it must have once."""
    if text.count(begin) != 1 or text.partition(begin)[2].count(end) != 1:
        raise ValueError(f"the page must have the lines {begin.strip()} and {end.strip()} once each")
    before, _, rest = text.partition(begin)
    return before + begin + content + end + rest.partition(end)[2]


def write_or_print(doc: str | None, path: Path, page: Callable[[str], str], tables: str) -> None:
    """The command of a script that makes tables of a page: print them, or with --write bring the page up to date."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        path.write_text(page(path.read_text()))
    else:
        print(tables)
