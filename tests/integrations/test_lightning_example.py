"""The example with Lightning runs, and ends sparse."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

from paths import ROOT

import growprune


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated")
def test_the_example_ends_sparse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning_fit.py", "--out", str(tmp_path), "--epochs", "2"])
    runpy.run_path(str(ROOT / "examples" / "lightning_fit.py"), run_name="__main__")
    assert "% right" in capsys.readouterr().out
    totals = growprune.manifest(tmp_path / "model.safetensors")["totals"]
    assert totals["prunable_nnz"] == 2458  # a tenth of 64 x 128 + 128 x 128
