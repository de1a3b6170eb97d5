"""What mkdocs does beside its own: the pages are also read where the repository is, so their links go outside docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent


def on_files(files: Any, config: Any) -> Any:
    """Pictures of experiments lie beside their scripts."""
    for picture in (ROOT / "experiments").rglob("*.svg"):
        files.append(File.generated(config, str(picture.relative_to(ROOT)), abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A picture of an experiment is in the site; any other file of the repository is named only."""
    markdown = re.sub(r"(!\[[^]]*\]\()\.\./", r"\1", markdown)
    return re.sub(r"\[([^]]*)\]\(\.\./([^)]*)\)", r"`\2`", markdown)
