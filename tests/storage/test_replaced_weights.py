"""Weights that become something computed, and models that change their dtype in the middle of training."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import growprune as gp
from growprune import GrowpruneError


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("apply", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_a_compact_weight_cannot_become_a_computed_one(apply: Callable[[nn.Module], Any]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    sparse = gp.SparseModel(model, sparsity=0.5, storage="compact")
    sparse.prune()
    x = torch.randn(2, 8)
    before = model(x)
    with pytest.raises(GrowpruneError, match="replaced by a computed tensor: apply weight_norm and other"):
        apply(model[0])
    if apply is nn.utils.parametrizations.weight_norm:  # which leaves the model as it was
        assert torch.equal(model(x), before)
        assert sparse.num_alive == 48


@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=False),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    ],
    ids=["adamw", "adam", "sgd"],
)
def test_a_model_may_change_its_dtype_in_the_middle_of_training(storage: str, make: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    sparse = gp.SparseModel(model, sparsity=0.5, storage=storage)
    sparse.prune()
    optimizer = sparse.attach(make(model.parameters()))
    for dtype in (torch.float32, torch.bfloat16, torch.bfloat16, torch.float64):
        model.to(dtype)
        optimizer.zero_grad()
        model(torch.randn(2, 8, dtype=dtype)).square().mean().backward()
        optimizer.step()
        moments = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()]
        assert {moment.dtype for moment in moments} == {dtype}
        assert sum(int(torch.count_nonzero(p)) for n, p in model.state_dict().items() if n in sparse.masks) == 48
