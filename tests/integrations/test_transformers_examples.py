"""The examples with transformers and accelerate run, and end as they say."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT


def example(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What an example prints last."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return (capsys.readouterr().out.splitlines() or [""])[-1]


def test_the_classification_learns(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    printed = example("transformers_classification.py", monkeypatch, capsys, "--out", str(tmp_path))
    accuracy, step = re.fullmatch(r"accuracy ([\d.]+), best at step (\d+)", printed).groups()  # type: ignore[union-attr]
    assert float(accuracy) > 0.9
    assert int(step) in (64, 80)  # the ends of the epochs in which nothing is grown any more


def test_the_language_model_is_saved_as_it_is(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    printed = example("transformers_causal_lm.py", monkeypatch, capsys, "--out", str(tmp_path))
    assert printed.endswith("4096 of 20480 weights live, saved and loaded the same: True")


def test_the_loop_with_accelerate_resumes(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    name, out = "accelerate_loop.py", ("--out", str(tmp_path))
    whole = example(name, monkeypatch, capsys, *out)
    example(name, monkeypatch, capsys, *out, "--stop-after", "25")
    assert example(name, monkeypatch, capsys, *out, "--resume", "--storage", "masked") == whole
    assert whole.endswith("Sparsifier(gradual_gap, finished after 60 iterations, sparsity 0.9001)")  # 422 of 4,224 live
