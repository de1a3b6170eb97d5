"""What docs/transformers.md says runs, and so do the examples."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT


def test_every_block_of_code_on_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = re.sub(r"## Sharded\n.*?\n(?=## )", "", (ROOT / "docs" / "transformers.md").read_text(), flags=re.S)
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)  # those that need several processes are tested elsewhere
    assert len(blocks) == 6
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    average = dict(names["averaging"].average.module.named_parameters())
    assert all(not average[name][~mask].any() for name, mask in names["callback"].sparse.masks.items())
    assert names["cursor"].is_over and names["sparse"].is_at_target
    assert names["callback"].sparse.num_alive < 0.11 * names["callback"].sparse.num_prunable


def example(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What an example prints last."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return (capsys.readouterr().out.splitlines() or [""])[-1]


def test_the_classification_learns(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    told = example("transformers_classification.py", monkeypatch, capsys, "--out", str(tmp_path))
    accuracy, step = re.fullmatch(r"accuracy ([\d.]+), best at step (\d+)", told).groups()  # type: ignore[union-attr]
    assert float(accuracy) > 0.9
    assert int(step) in (64, 80)  # the ends of the epochs in which nothing is grown any more


def test_the_language_model_is_saved_as_it_is(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    told = example("transformers_causal_lm.py", monkeypatch, capsys, "--out", str(tmp_path))
    assert told.endswith("4096 of 20480 weights live, saved and loaded the same: True")


def test_the_loop_with_accelerate_resumes(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    name, out = "accelerate_loop.py", ("--out", str(tmp_path))
    whole = example(name, monkeypatch, capsys, *out)
    example(name, monkeypatch, capsys, *out, "--stop-after", "25")
    assert example(name, monkeypatch, capsys, *out, "--resume", "--storage", "masked") == whole
    assert whole.endswith("422 of 4224 weights live")
