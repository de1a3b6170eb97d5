"""Lightning Fabric needs no callback: `gp.sparsify` works before and after `fabric.setup`."""

import pytest
import torch
from torch import nn

import growprune as gp

fabric_of = pytest.importorskip("lightning.fabric").Fabric


def trained(setup: str) -> tuple[gp.Sparsifier, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if setup == "sparsify first":
        sparsifier = gp.sparsify(model, optimizer, sparsity=0.8, iterations=40)
    fabric = fabric_of(accelerator="cpu", devices=1)
    wrapped, its_optimizer = fabric.setup(model, optimizer) if setup != "no fabric" else (model, optimizer)
    if setup != "sparsify first":
        sparsifier = gp.sparsify(model, optimizer, sparsity=0.8, iterations=40)
    for _ in range(40):
        its_optimizer.zero_grad()
        loss = nn.functional.cross_entropy(wrapped(torch.randn(8, 16)), torch.randint(4, (8,)))
        loss.backward() if setup == "no fabric" else fabric.backward(loss)
        its_optimizer.step()
    return sparsifier, model.state_dict()


@pytest.mark.parametrize("setup", ["sparsify first", "fabric first"])
def test_fabric_trains_the_bits_of_a_plain_loop(setup: str) -> None:
    (sparsifier, found), (_, expected) = trained(setup), trained("no fabric")
    assert sparsifier.is_finished
    assert sparsifier.sparsity == pytest.approx(0.8, abs=1e-3)
    assert {name for name in expected if not torch.equal(found[name], expected[name])} == set()
