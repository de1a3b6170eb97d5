"""What the README says holds."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from torch import nn
from torch.distributed.run import get_args_parser

import growprune
from growprune.engine.cost import estimate
from growprune.engine.override import override, parse_settings
from growprune.methods import METHODS
from growprune.recipes import RECIPES

README = (ROOT / "README.md").read_text()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.blocks = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 32, 3))
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def blocks() -> list[str]:
    """The Python code of the README."""
    return re.findall(r"```python\n(.*?)```", README, re.S)


def run(code: str) -> dict[str, Any]:
    """Run a block with what a reader has: a model, data, and a loss."""
    torch.manual_seed(0)
    loader = [(torch.randn(4, 3, 12, 12), torch.randint(10, (4,))) for _ in range(2)]
    names: dict[str, Any] = {"gp": growprune, "torch": torch, "model": Net(), "loader": loader, "epochs": 3}
    names |= {"loss_fn": nn.CrossEntropyLoss(), "example": loader[0][0], "Model": Net}
    exec(code, names)
    return names


@pytest.mark.parametrize("code", blocks(), ids=lambda code: code.split("\n")[0])
def test_every_block_of_code_runs_as_it_stands(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(code)


def test_the_plain_loop_ends_sparse_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    names = run(blocks()[0])
    sparse, cursor = names["sparse"], names["cursor"]
    assert sparse.num_alive == 965  # a tenth of 432 + 2,304 + 2,304 + 4,608
    assert "head.weight" not in sparse.masks
    assert (tmp_path / "model.safetensors").stat().st_size > 0
    assert "blocks.2.weight" in capsys.readouterr().out
    # a random mask; four steps of an iteration, each prunes and grows; fine-tuning
    assert [len(scheduled.phase.edits) for scheduled in cursor.schedule] == [1, 2, 2, 2, 2, 1]
    assert cursor.is_over
    assert cursor.iteration == 6


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_command_names_a_recipe_and_settings_that_exist() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    commands = re.findall(r"^ *(?:torchrun .*-m (?:-- )?)?growprune (plan|train) (\S+)([^#\n]*)", text, re.M)
    assert len(commands) > 20
    for verb, name, rest in commands:
        if ".py:" in name:  # a file of the reader's
            continue
        recipe = override(RECIPES[name](), parse_settings(re.findall(r"--set (\S+)", rest)))
        if verb == "plan":
            assert estimate(recipe).costs


def torchrun_commands() -> list[str]:
    """The lines of the pages that start growprune by torchrun, in one line each, without what a shell would put in."""
    text = re.sub(r"\\\n *", "", "\n".join(page.read_text() for page in PAGES))
    found = re.findall(r"^ *(?:srun )?(torchrun [^\n]*-m (?:-- )?growprune [^#\n]*)", text, re.M)
    return [re.sub(r"\$\([^)]*\)|\$\w+", "1", line).strip() for line in found]


@pytest.mark.parametrize("line", torchrun_commands())
def test_torchrun_leaves_to_growprune_what_is_for_growprune(line: str) -> None:
    own, _, rest = line.partition("growprune ")
    found = get_args_parser().parse_args(shlex.split(line)[1:])
    assert (found.module, found.training_script) == (True, "growprune")
    assert found.training_script_args == shlex.split(rest)
    alone = get_args_parser().parse_args([*shlex.split(own)[1:], "growprune"])
    assert found.log_dir == alone.log_dir is None


def test_a_page_shows_how_torchrun_is_given_a_log_for_growprune(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in torchrun_commands() if "--log " in line]
    assert len(lines) == 2
    for line in lines:
        with pytest.raises(SystemExit):  # which is why there is a -- in it
            get_args_parser().parse_args(shlex.split(line.replace("-m -- ", "-m "))[1:])
        assert "ambiguous option: --log could match --log-dir" in capsys.readouterr().err


def test_the_number_of_rivals_is_right() -> None:
    rivals = [name for name in METHODS if not name.endswith("gap") and name != "dense"]
    assert f"{len(rivals)} rivals" in " ".join(README.split())


def test_every_file_that_is_linked_exists() -> None:
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        for path in re.findall(r"\]\(([\w/.-]+)(?:#[\w-]+)?\)", page.read_text()):
            assert (page.parent / path).exists(), f"{page.name} links {path}"


OLD_WORDS = (
    "Stretch stretch Held held brings twin also fill walking joining sharing _meet _tell _note Curve curve Say rooms"
)


def test_no_identifier_has_an_old_word() -> None:
    old = set(OLD_WORDS.split())
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {getattr(node, field, None) for node in ast.walk(tree) for field in ("id", "attr", "arg", "name")}
        assert old.isdisjoint(names | {path.stem}), f"{path.name}: {old & (names | {path.stem})}"


def test_every_public_name_exists_and_has_a_docstring() -> None:
    package = importlib.import_module("growprune")
    for name in package.__all__:
        assert getattr(package, name).__doc__, name
    assert sorted(package.__all__) == sorted(package._HOME)
