"""experiments/cells.py: its commands are accepted, and a comparison out of time is stopped."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from growprune.recipes import find


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "experiments")
    import cells as found

    return found


def test_every_cell_has_a_recipe_two_sparsities_and_fields_that_exist(cells: Any) -> None:
    for study in cells.CELLS:
        words = cells.command(study, Path("data"), Path("runs"), 4)
        recipe = find(words[4])
        assert len(words[words.index("--sparsities") + 1].split(",")) == 2
        for field in (words[i + 1].split("=")[0] for i, word in enumerate(words) if word in ("--set", "--tune")):
            owner: Any = recipe
            for name in field.split("."):
                assert hasattr(owner, name), f"{study} sets {field}"
                owner = getattr(owner, name)


def test_a_comparison_out_of_time_is_stopped_and_told_from_one_that_failed(cells: Any) -> None:
    def python(code: str) -> list[str]:
        return [sys.executable, "-c", code]

    assert cells.carry_out(python("import time; time.sleep(600)"), 0.1) is None
    assert cells.carry_out(python("raise SystemExit(3)"), float("inf")) == 3


def test_results_are_packed_by_their_place_and_nothing_else_is(cells: Any, tmp_path: Path) -> None:
    for name in ("a/seed0/result.json", "a/tuning.json", "a/seed0/model.safetensors"):
        (tmp_path / "runs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / name).write_text("{}")
    cells.pack(tmp_path / "runs", tmp_path / "all.tar.gz")
    with tarfile.open(tmp_path / "all.tar.gz") as archive:
        assert sorted(archive.getnames()) == ["a/seed0/result.json", "a/tuning.json"]
