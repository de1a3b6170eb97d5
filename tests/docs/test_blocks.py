"""Every Python block of a page runs as printed, pasted into an empty file in the order of the page.

A block that cannot run here has a comment above it that says why: `<!-- not run: needs two GPUs -->`.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

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


def first_loop(names: dict[str, Any], _: Path, __: str) -> None:
    assert names["sparsifier"].is_finished
    assert names["sparsifier"].sparse.num_alive == 40960  # a tenth of 64 x 256 + 6 x 256 x 256


def own_loop(names: dict[str, Any], _: Path, __: str) -> None:
    assert names["cursor"].is_over
    assert names["sparse"].num_alive == 819 + 1638 + 128  # of 64 x 128, 128 x 128 and 128 x 10


def digits(names: dict[str, Any], folder: Path, printed: str) -> None:
    """The resumed training is exact, and the page shows what is printed."""
    assert names["sparsifier"].sparse.num_alive == 2794  # a tenth of 288 + 3 * 9,216
    assert all(map(torch.equal, names["model"].state_dict().values(), names["resumed"].state_dict().values()))
    page = (ROOT / "docs" / "tutorial-digits.md").read_text()
    exact = [line for line in printed.splitlines() if "images" in line or line.startswith("Sparsifier")]
    assert [line for line in exact if line not in page] == []
    (size,) = re.findall(r"bytes, sparse ([\d,]+) bytes", page)
    assert (folder / "model.safetensors").stat().st_size == pytest.approx(int(size.replace(",", "")), rel=0.05)


def deploying(names: dict[str, Any], _: Path, __: str) -> None:
    """The model computes the same in every form."""
    expected = names["model"].eval()(names["example"]).detach()
    for outputs in (names["outputs"], names["again"](names["example"])):
        assert (outputs - expected).abs().max() <= 1e-5 * expected.abs().max()


def files(names: dict[str, Any], _: Path, __: str) -> None:
    assert torch.equal(names["served"](names["example"]), names["plain"](names["example"]))
    assert sum(int((names["tensors"][name] != 0).sum()) for name in ("0.weight", "2.weight")) == 1638  # a tenth
    assert int(names["sparse"].masks["0.weight"].sum()) == 819  # of 8,192, as the other tool has pruned


def memory(names: dict[str, Any], _: Path, __: str) -> None:
    assert not torch.autograd.is_multithreading_enabled()
    assert names["sparsifier"].sparse.storage == names["sparse"].storage == "compact"
    assert names["sparse"].num_alive == 16384 + 6554 + 256  # the part that is dense, and a tenth of the others


CHECKS: dict[str, Callable[[dict[str, Any], Path, str], None]] = {
    "README.md": first_loop,
    "docs/index.md": first_loop,
    "docs/own-loop.md": own_loop,
    "docs/tutorial-digits.md": digits,
    "docs/deploying.md": deploying,
    "docs/files.md": files,
    "docs/memory.md": memory,
}
"""What must hold after the code of a page has run: of its names, its folder, and what it printed."""


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated")  # torch's, in Lightning
@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:Checkpoint directory")  # Lightning's, of a training that is resumed
@pytest.mark.filterwarnings("ignore:deployed, the model takes")  # a model so small may be faster in torch
@pytest.mark.parametrize("page", with_code(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_code_of_a_page_runs_as_printed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module = ModuleType("pasted")  # with nothing in it
    monkeypatch.setitem(sys.modules, "pasted", module)
    threads = torch.autograd.is_multithreading_enabled()
    try:
        exec(compile(code_of(page), str(page), "exec"), vars(module))
        if page.is_relative_to(ROOT) and page.relative_to(ROOT).as_posix() in CHECKS:
            CHECKS[page.relative_to(ROOT).as_posix()](vars(module), tmp_path, capsys.readouterr().out)
    finally:
        torch.autograd.set_multithreading_enabled(threads)


def test_a_block_without_its_import_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nimport torch\n```\n\n<!-- not run: no such name -->\n```python\nnothing\n```\n")
    assert code_of(page).split() == ["import", "torch"]
    page.write_text("# A page\n\n```python\nprint(gp.__name__)\n```\n")
    with pytest.raises(NameError, match="gp"):
        test_the_code_of_a_page_runs_as_printed(page, tmp_path, monkeypatch, capsys)
