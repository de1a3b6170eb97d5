"""Tables inside of pages, between two lines that stay."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path


def put(text: str, begin: str, end: str, content: str) -> str:
    """The text with other content between the two lines, each of which it must have once."""
    if text.count(begin) != 1 or text.partition(begin)[2].count(end) != 1:
        raise ValueError(f"the page must have the lines {begin.strip()} and {end.strip()} once each")
    before, _, rest = text.partition(begin)
    return before + begin + content + end + rest.partition(end)[2]


def filled(page: Path, tables: Mapping[str, str]) -> str:
    """The page with each table between `<!-- NAME -->` and `<!-- end of NAME -->`."""
    text = page.read_text()
    for name, table in tables.items():
        text = put(text, f"<!-- {name} -->\n", f"<!-- end of {name} -->", table)
    return text


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with its names to the left and its numbers to the right."""
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def write_or_print(doc: str | None, files: Mapping[Path, str]) -> None:
    """The command of a script that makes tables: print the files that have them, or with --write write these."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        write(files)
    else:
        print("\n".join(files.values()))


def write(files: Mapping[Path, str]) -> None:
    for path, text in files.items():
        path.write_text(text)
