"""What is given to people who do not have the repository."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from paths import ROOT


def test_the_wheel_has_every_file_of_the_package_and_no_other(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    package = ROOT / "src" / "growprune"
    ours = {p.relative_to(package.parent).as_posix() for p in package.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        entry_points = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "growprune = growprune.cli:main" in archive.read(entry_points).decode()
    assert names == ours
    assert {"growprune/py.typed", "growprune/report/page.css", "growprune/report/page.js"} <= names


def test_every_dependency_and_extra_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(item for items in project["optional-dependencies"].values() for item in items)]
    names = {re.split(r"[>\[]", item)[0].lower() for item in asked if not item.startswith("growprune[")}
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().split()}
    assert names <= pinned
