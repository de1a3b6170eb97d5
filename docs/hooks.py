"""What mkdocs does beside its own. The pages are also read where the repository is, so they are plain markdown there.

- A file outside docs/ that a page links is copied to the site; a page among them is not searched.
- `<!-- tabs -->`: paragraphs that begin with a bold line become tabs.
- `<!-- reference ... -->`: the lines of mkdocstrings, which a git host would show as text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import indent
from typing import Any

from mkdocs.structure.files import File
from plotly.offline import get_plotlyjs

from growprune.report.page import render
from growprune.runs import find_runs

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LINK = re.compile(r"(?<=\]\()([\w/.-]+)(?=[#)])")


def on_files(files: Any, config: Any) -> Any:
    """Add the page of a comparison, and each file of the repository that a page links, and so on."""
    page = render(find_runs([ROOT / "experiments" / "compare" / "cifar10-width32"]), get_plotlyjs())
    files.append(File.generated(config, "cifar10-report.html", content=page))
    pages, copied = [*DOCS.rglob("*.md")], set[Path]()
    while pages:
        page = pages.pop()
        for found in {(page.parent / link).resolve() for link in LINK.findall(page.read_text())} - copied:
            if found.is_file() and not found.is_relative_to(DOCS):
                copied.add(found)
                pages += [found] if found.suffix == ".md" else []
                uri = found.relative_to(ROOT).as_posix()
                files.append(File.generated(config, uri, abs_src_path=str(found)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    here = DOCS / uri if (DOCS / uri).exists() else ROOT / uri
    if not here.is_relative_to(DOCS):
        page.meta["search"] = {"exclude": True}

    def moved(link: re.Match[str]) -> str:
        found = (here.parent / link[1]).resolve()
        if not found.is_file():
            return link[1]
        there = found.relative_to(DOCS if found.is_relative_to(DOCS) else ROOT)
        return posixpath.relpath(there.as_posix(), posixpath.dirname(uri) or ".")

    markdown = LINK.sub(moved, markdown)
    markdown = markdown.replace("`cifar10-report.html`", "[cifar10-report.html](cifar10-report.html)")  # made above
    markdown = re.sub(r"<!-- reference\n(.*?)-->", r"\1", markdown, flags=re.S)
    markdown = re.sub(r"<!-- tabs -->\n(.*?)<!-- end of tabs -->", tabs, markdown, flags=re.S)
    return "\n".join(part_lists(markdown.splitlines()))


def tabs(found: re.Match[str]) -> str:
    _, *parts = re.split(r"^\*\*(.+)\*\*\n", found[1], flags=re.M)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return "\n\n".join(f'=== "{title}"\n\n{indent(body.strip(), "    ")}' for title, body in pairs)


def part_lists(lines: Iterable[str]) -> Iterator[str]:
    """Put an empty line before a list or code that follows its sentence at once: GitHub needs none, mkdocs does."""
    before, is_code = "", False
    for line in lines:
        is_fence = line.startswith("```")
        is_list = line.startswith("- ") and not before.startswith(("- ", "  "))
        if before and not is_code and (is_list or is_fence):
            yield ""
        yield line
        is_code ^= is_fence
        before = line
