"""Every Python block of a page runs as printed, pasted into an empty file in the order of the page.

A block that cannot run here has a comment above it that says why: `<!-- not run: needs two GPUs -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from paths import ROOT

PAGES = sorted(path for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"(<!-- not run: [^>]+ -->\n+)?^```python\n(.*?)^```$", re.S | re.M)


def code_of(page: Path) -> str:
    """The blocks of a page that run, one below the other, on the lines that they have in the page."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for found in BLOCK.finditer(text):
        if found[1] is None:
            first = text.count("\n", 0, found.start(2))
            block = found[2].split("\n")
            lines[first : first + len(block)] = block
    return "\n".join(lines)


def with_code() -> list[Path]:
    return [page for page in PAGES if code_of(page).strip()]


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated")  # torch's, in Lightning
@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:Checkpoint directory")  # Lightning's, of a training that is resumed
@pytest.mark.filterwarnings("ignore:deployed, the model takes")  # a model so small may be faster in torch
@pytest.mark.parametrize("page", with_code(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_code_of_a_page_runs_as_printed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module = ModuleType("pasted")  # with nothing in it
    monkeypatch.setitem(sys.modules, "pasted", module)
    threads = torch.autograd.is_multithreading_enabled()
    try:
        exec(compile(code_of(page), str(page), "exec"), vars(module))
    finally:
        torch.autograd.set_multithreading_enabled(threads)


def test_a_block_without_its_import_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nimport torch\n```\n\n<!-- not run: no such name -->\n```python\nnothing\n```\n")
    assert code_of(page).split() == ["import", "torch"]
    page.write_text("# A page\n\n```python\nprint(gp.__name__)\n```\n")
    with pytest.raises(NameError, match="gp"):
        test_the_code_of_a_page_runs_as_printed(page, tmp_path, monkeypatch)
