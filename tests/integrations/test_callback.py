"""What the callbacks of all trainers share: figures to log, and copies of the model."""

import copy

import pytest
import torch
from torch import nn

from growprune import Cursor, Partition, SparseModel, methods, sparsify
from growprune.integrations.callback import Figures, SparseCallback


def test_churn_is_the_share_of_the_live_weights_that_were_dead() -> None:
    model = nn.Linear(4, 4)
    parts = Partition.contiguous(model, 1)
    cursor = Cursor(SparseModel(model, sparsity=0.5), methods.dense(parts, epochs=1))
    cursor.sparse.prune()
    figures = Figures(cursor)
    assert figures.read() == {"sparsity": 0.5, "live_weights": 8, "phase": -1, "churn": 0.0}
    cursor.sparse.grow(to=0.375)  # two more
    assert figures.read()["churn"] == 0.2
    assert figures.read()["churn"] == 0.0


def test_copies_and_churn_follow_a_rule_that_changes_masks_without_an_edit() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    average, callback = copy.deepcopy(model), SparseCallback("deepr", sparsity=0.8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    how = {"sparsity": 0.8, "iterations": 40, "l1": 1e-3, "temperature": 1e-3, "keep_dense": ()}
    callback._sparsifier = sparsify(model, optimizer, "deepr", **how)
    sparse = callback.sparse
    callback.add_copy(average)
    figures, before = Figures(callback.cursor), sparse.masks
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for mine, its in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.1)
        callback._mask_copies([])
    born = sum(int((mask & ~before[name]).sum()) for name, mask in sparse.masks.items())
    assert born > 0
    assert figures.read()["churn"] == born / sparse.num_alive
    for name, mask in sparse.masks.items():
        assert not average.get_parameter(name)[~mask].any()


def test_figures_build_no_state_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is dense in compact storage, and of a sharded model something that all processes would have to ask for."""
    model = nn.Linear(4, 4)
    cursor = Cursor(SparseModel(model, sparsity=0.5), methods.dense(Partition.contiguous(model, 1), epochs=1))
    monkeypatch.setattr(cursor.sparse.gradients, "state_dict", lambda: pytest.fail("the state was asked for"))
    figures = Figures(cursor)
    cursor.sparse.prune()
    assert figures.read()["sparsity"] == 0.5
