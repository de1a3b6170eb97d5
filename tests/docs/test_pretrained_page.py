"""What docs/pretrained.md shows runs, in its order, and ends as it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from paths import ROOT
from torch import Tensor, nn

import growprune as gp
from growprune.engine.override import override, parse_settings
from growprune.recipes import RECIPES
from growprune.sparse.internals import internals

PAGE = (ROOT / "docs" / "pretrained.md").read_text()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))
        self.lm_head = nn.Linear(16, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.lm_head(x)


class MyDense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(8, 4))


def what_a_reader_has() -> dict[str, Any]:
    pruned = nn.Linear(32, 32)
    pruned.weight.data[torch.rand(32, 32) < 0.8] = 0
    loader = [(torch.randn(4, 16), torch.randint(3, (4,))) for _ in range(2)]
    names: dict[str, Any] = {"torch": torch, "model": Encoder(), "decoder": Decoder(), "loader": loader, "epochs": 3}
    names |= {"loss_fn": nn.CrossEntropyLoss(), "text": [torch.randint(8, (2, 6))], "MyDense": MyDense}
    return names | {"pruned_elsewhere": pruned, "Encoder": Encoder}


def test_every_block_of_code_runs_in_order(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = what_a_reader_has()
    encoder, decoder, layer, elsewhere, again = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(encoder, names)
    assert names["sparse"].num_alive == 205  # a fifth of 1,024
    expected = names["model"].state_dict()
    exec(decoder, names)
    assert names["sparse"].num_alive == sum(round(w.numel / 5) for w in names["sparse"].weights)
    exec(layer, names)
    assert gp.SparseModel(MyDense(), sparsity=0.5).weights[0].transposed
    exec(elsewhere, names)
    alive = int(names["pruned_elsewhere"].weight.count_nonzero())
    assert capsys.readouterr().out == f"{alive} of 1024\n"
    exec(again, names)
    found = names["again"]
    assert (found.num_alive, internals(found).storage) == (205, "compact")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.model.state_dict().items())


def test_every_command_names_a_recipe_and_settings_that_exist() -> None:
    commands = re.findall(r"^growprune train (\S+) ([^#\n]*)", PAGE, re.M)
    assert len(commands) == 2
    for name, rest in commands:
        override(RECIPES[name](), parse_settings(re.findall(r"--set (\S+)", rest)))


def test_there_is_a_place_for_the_table() -> None:
    assert re.search(r"<!-- table: begin -->\n.+\n<!-- table: end -->", PAGE, re.S)
