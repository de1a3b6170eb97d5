"""Count the words of every page, and the words of its sentences: `python docs/words.py [--longest 5]`.

Code, tables and headings do not count as sentences; links count by their text.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def prose(text: str) -> str:
    """A page without code, tables, headings, pictures and comments; links as their text."""
    text = re.sub(r"^```.*?^```$", "\n\n", text, flags=re.S | re.M)
    text = re.sub(r"<!--.*?-->|!\[[^\]]*\]\([^)]*\)", "", text, flags=re.S)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "Code", text)
    text = re.sub(r"^(\||#|:::).*$", "\n", text, flags=re.M)
    return re.sub(r"^\s*([-*]|\d+\.) ", "\n\n", text, flags=re.M)


def sentences(text: str) -> list[str]:
    """The sentences of a page. A colon or semicolon does not end one; a paragraph or a list item does."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", prose(text))]
    found = [s.strip() for paragraph in paragraphs for s in re.split(r"(?<=[.!?])\s+(?=[A-Z`\"(*])", paragraph)]
    return [sentence for sentence in found if sentence]


def count(text: str) -> int:
    """The words of a page, code and tables included. The bars of tables are none."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=0, help="show that many of the longest sentences")
    shown = parser.parse_args().longest
    total, every = 0, []
    print(f"{'page':32} {'words':>6} {'mean':>5} {'longest':>7}")
    for page in pages():
        text = page.read_text(encoding="utf-8")
        lengths = [len(sentence.split()) for sentence in sentences(text)] or [0]
        total += (words := count(text))
        every += [(len(s.split()), page.relative_to(ROOT).as_posix(), s) for s in sentences(text)]
        mean = sum(lengths) / len(lengths)
        print(f"{page.relative_to(ROOT).as_posix():32} {words:6} {mean:5.1f} {max(lengths):7}")
    print(f"{'all pages':32} {total:6}")
    for length, where, sentence in sorted(every, reverse=True)[:shown]:
        print(f"{length:3} {where}: {sentence}")


if __name__ == "__main__":
    main()
