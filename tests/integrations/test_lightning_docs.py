"""What docs/lightning.md and examples/lightning_fit.py say holds."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pl = pytest.importorskip("lightning.pytorch")

from paths import ROOT  # noqa: E402

import growprune  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:Starting from v1.9.0"),
    pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode"),
]


class Module(pl.LightningModule):
    """What a reader has."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_every_block_of_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = TensorDataset(torch.randn(16, 8), torch.randint(2, (16,)))
    names: dict[str, Any] = {"gp": growprune, "torch": torch, "Module": Module, "loader": DataLoader(data, 8)}
    page = re.sub(r"## Sharded\n.*?\n(?=## )", "", (ROOT / "docs" / "lightning.md").read_text(), flags=re.S)
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)  # those that need several processes are tested elsewhere
    assert len(blocks) == 4
    counts = []
    for code in blocks:
        names |= {"module": Module(), "val_loader": DataLoader(data, 16)}
        exec(code, names)
        counts.append(names["sparsify"].sparse.num_alive)
    assert counts == [32, 30, 30, 30]  # a tenth of 5 x 64 weights in all, then 6 of each 64
    assert (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "runs" / "best.ckpt").exists()


def test_the_example_ends_sparse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning_fit.py", "--out", str(tmp_path), "--epochs", "2"])
    runpy.run_path(str(ROOT / "examples" / "lightning_fit.py"), run_name="__main__")
    assert "% right" in capsys.readouterr().out
    totals = growprune.manifest(tmp_path / "model.safetensors")["totals"]
    assert totals["prunable_nnz"] == 2458  # a tenth of 64 x 128 + 128 x 128
