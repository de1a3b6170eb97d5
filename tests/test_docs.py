"""The site: its code runs, every public name is in it, and it is built without a complaint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import growprune
from growprune.methods import METHODS
from test_readme import ROOT, run

DOCS = ROOT / "docs"
GUIDES = ("index", "own-loop", "choosing", "extending")


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.S)


@pytest.mark.parametrize("page", GUIDES)
def test_the_code_of_a_guide_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks(page)
    assert found
    for code in found:  # each with a model, data and a loss of its own
        run(f"import growprune as gp\n{code}")


def test_every_public_name_is_in_the_reference() -> None:
    reference = (DOCS / "api.md").read_text()
    homes = {f"::: {growprune._HOME[name]}.{name}" for name in growprune.__all__ if name not in ("methods", "tasks")}
    homes |= {f"::: growprune.methods.{name}.{name}" for name in METHODS}
    assert homes - set(reference.splitlines()) == set()


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in DOCS.glob("*.md") if f" {page.name}\n" not in navigation] == []


def test_the_site_is_built_without_a_complaint(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "site" / "api" / "index.html").read_text()
    assert "peak_density" in page
    assert (tmp_path / "site" / "experiments" / "theory" / "explored.svg").exists()
    for built in (tmp_path / "site").rglob("*.html"):
        assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="https?://', built.read_text()), built.name


def test_pictures_are_those_that_the_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import pictures

    for name, draw in pictures.PICTURES.items():
        assert (DOCS / "images" / name).read_text() == draw(), f"run experiments/pictures.py for {name}"
