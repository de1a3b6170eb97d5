"""What mkdocs does beside its own: the pages are also read where the repository is, so their links go outside docs/."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from plotly.offline import get_plotlyjs

from growprune.report.page import render
from growprune.runs import find_runs

ROOT = Path(__file__).parent.parent


def on_files(files: Any, config: Any) -> Any:
    """Pictures of experiments lie beside their scripts, and the page of the comparison is made of its results."""
    for picture in (ROOT / "experiments").rglob("*.svg"):
        files.append(File.generated(config, str(picture.relative_to(ROOT)), abs_src_path=str(picture)))
    page = render(find_runs([ROOT / "experiments" / "compare" / "cifar10-width32"]), get_plotlyjs())
    files.append(File.generated(config, "cifar10-report.html", content=page))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """A picture of an experiment is in the site; any other file of the repository is named only."""
    up = r"\.\./" * page.file.src_uri.count("/")  # to docs/, from a page in a folder of it
    markdown = markdown.replace("`cifar10-report.html`", "[cifar10-report.html](cifar10-report.html)")  # made above
    markdown = re.sub(rf"(!\[[^]]*\]\({up})\.\./", r"\1", markdown)
    markdown = re.sub(rf"\[([^]]*)\]\({up}\.\./([^)]*)\)", r"`\2`", markdown)
    return "\n".join(part_lists(markdown.splitlines()))


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
