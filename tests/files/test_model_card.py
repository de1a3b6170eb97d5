"""The README.md of a pretrained folder."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import growprune as gp
from growprune.files.convert import convert


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.one, self.two = nn.Linear(16, 10, bias=False), nn.Linear(10, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(self.norm(self.conv(x)).flatten(1)))


def saved(model: nn.Module, folder: Path, storage: str = "masked", **options: bool) -> gp.SparseModel:
    sparse = gp.SparseModel(model, sparsity=0.75, storage=storage)
    sparse.prune()
    gp.save_pretrained(sparse, folder, **options)
    return sparse


def code_of(card: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(code.splitlines()) == 3
    return str(code)


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_card_counts_the_weights_and_the_bytes(storage: str, tmp_path: Path) -> None:
    saved(Net(), tmp_path / "mine", storage)
    card = (tmp_path / "mine" / "README.md").read_text()
    lines = card.splitlines()
    assert lines[:6] == ["---", "library_name: growprune", "tags:", "- sparse", "- pruning", "---"]
    assert "# mine" in lines
    assert "A sparse model: 75.00% of its prunable weights are zero (pattern `unstructured`)." in lines
    assert "59 of 236 prunable weights are non-zero, of 253 weights in all." in lines
    for name in ("model.safetensors", "growprune.safetensors"):
        assert f"| {name} | {(tmp_path / 'mine' / name).stat().st_size:,} |" in lines
    assert "license" not in card


@pytest.mark.parametrize("model", [Net(), nn.Sequential(nn.Linear(8, 4))], ids=["class", "function"])
def test_the_code_on_a_card_loads_the_model(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = saved(model, tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    scope = {} if isinstance(model, Net) else {"build_model": lambda: nn.Sequential(nn.Linear(8, 4))}
    exec(code_of((tmp_path / "mine" / "README.md").read_text()), scope)
    found = scope["sparse"]
    assert found.num_alive == sparse.num_alive
    state = sparse.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.model.state_dict().items())


def test_a_model_of_transformers_is_loaded_by_its_class_and_names_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    model.config._name_or_path = "someone/tiny-gpt2"
    sparse = saved(model, tmp_path / "mine")
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "\nbase_model: someone/tiny-gpt2\n---\n" in card
    monkeypatch.chdir(tmp_path)
    scope: dict[str, gp.SparseModel] = {}
    exec(code_of(card), scope)
    assert scope["sparse"].num_alive == sparse.num_alive


@pytest.mark.parametrize("base", ["", "./out/checkpoint-3", "/home/me/model", "mine"])
def test_a_base_that_is_a_folder_is_not_named(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = Net()
    model.config = type("Config", (), {"_name_or_path": base})()
    saved(model, tmp_path / "mine")
    assert "base_model" not in (tmp_path / "mine" / "README.md").read_text()


def test_a_card_names_the_method_of_the_plan(tmp_path: Path) -> None:
    model = Net()
    sparse = gp.SparseModel(model, sparsity=0.75, allocation="erk")
    plan = gp.methods.set_(gp.Partition.contiguous(model, 1), sparsity=0.75, iterations=2, every=1)
    cursor = gp.Cursor(sparse, plan)
    optimizer = cursor.attach(torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(2):
        model(torch.randn(2, 1, 4, 4)).sum().backward()
        optimizer.step()
    gp.save_pretrained(sparse, tmp_path)
    assert " Trained with the method `set`.\n" in (tmp_path / "README.md").read_text()


def test_a_card_is_written_again_until_somebody_edits_it(tmp_path: Path) -> None:
    saved(nn.Sequential(nn.Linear(8, 4)), tmp_path)
    saved(Net(), tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "59 of 236" in card
    mine = "\n".join(line for line in card.splitlines() if "Written by growprune" not in line) + "license: mit\n"
    (tmp_path / "README.md").write_text(mine)
    saved(nn.Sequential(nn.Linear(8, 4)), tmp_path)
    assert (tmp_path / "README.md").read_text() == mine


def test_a_card_can_be_left_out(tmp_path: Path) -> None:
    saved(Net(), tmp_path, model_card=False)
    assert not (tmp_path / "README.md").exists()


def test_converting_a_folder_keeps_its_own_readme(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    weight = torch.eye(8)
    save_file({"weight": weight}, tmp_path / "theirs" / "model.safetensors")
    convert(tmp_path / "theirs", tmp_path / "first")
    card = (tmp_path / "first" / "README.md").read_text()
    assert "# first\n" in card and "\n8 of 64 prunable" in card
    (tmp_path / "theirs" / "README.md").write_text("mine")
    convert(tmp_path / "theirs", tmp_path / "second")
    assert (tmp_path / "second" / "README.md").read_text() == "mine"
