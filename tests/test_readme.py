"""What the README says holds."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.blocks = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 32, 3))
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def test_the_api_example_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    (example,) = [
        code for code in re.findall(r"```python\n(.*?)```", README, re.S) if code.startswith("import growprune")
    ]
    loader = [(torch.randn(4, 3, 12, 12), torch.randint(10, (4,))) for _ in range(2)]
    names = {
        "torch": torch,
        "model": Net(),
        "loader": loader,
        "loss_fn": nn.CrossEntropyLoss(),
        "example": loader[0][0],
    }
    exec(example, names)
    sparse = names["sparse"]
    assert sparse.mask("blocks.2.weight").any()
    assert "head.weight" not in sparse.masks
    assert (tmp_path / "model.safetensors").stat().st_size > 0
    assert "blocks.2.weight" in capsys.readouterr().out


def test_the_algorithm_shown_is_the_code_that_runs() -> None:
    (shown,) = [code for code in re.findall(r"```python\n(.*?)```", README, re.S) if code.startswith("yield Phase")]
    source = (ROOT / "src" / "growprune" / "methods" / "cyclic_gap.py").read_text()

    def squeeze(text: str) -> str:
        return re.sub(r"\s+", "", text)

    assert squeeze(shown) in squeeze(source)


def test_every_command_and_file_the_readme_names_exists() -> None:
    from growprune.recipes import RECIPES

    for name in re.findall(r"growprune (?:plan|train) (\S+)", README):
        assert name in RECIPES
    for path in re.findall(r"\]\(([\w/.]+)\)", README):
        assert (ROOT / path).exists(), path


def test_every_public_name_exists_and_has_a_docstring() -> None:
    package = importlib.import_module("growprune")
    for name in package.__all__:
        assert getattr(package, name).__doc__, name
    assert sorted(package.__all__) == sorted(package._HOME)
