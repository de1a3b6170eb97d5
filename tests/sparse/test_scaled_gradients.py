"""A GradScaler leaves it to fused optimizers to unscale gradients and to skip steps: rules and plans see neither."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from growprune import Cursor, Partition, SparseModel, methods

PLANS: dict[str, dict[str, Any]] = {
    "admm": {"every": 2, "rho": 1.0, "begin": 0.0, "until": 1.0},
    "deepr": {"l1": 1e-2, "temperature": 1e-3},
    "dpf": {"every": 2},
    "rigl": {"every": 2},
    "snfs": {"every": 4},
    "str": {},
}
"""Methods with a rule, and those that look at gradients, with options under which a short plan does something."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}
ITERATIONS = 12
BAD = -1
"""Stands for a batch whose gradients are infinite."""


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(number: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(number))


def trained(
    method: str,
    optimizer: str,
    batches: Sequence[int],
    *,
    is_scaled: bool = True,
    is_clipped: bool = False,
    growth_interval: int = 2000,
) -> tuple[SparseModel, Cursor]:
    model = net()
    sparse = SparseModel(model, sparsity=0.5, allocation="global")
    plan = methods.METHODS[method](Partition.contiguous(model, 1), sparsity=0.5, iterations=ITERATIONS, **PLANS[method])
    cursor = Cursor(sparse, plan)
    attached = cursor.attach(OPTIMIZERS[optimizer](model.parameters()))
    scaler = torch.amp.GradScaler("cpu", enabled=is_scaled, growth_interval=growth_interval)
    for number in batches:
        loss = model(batch(number)).square().mean() * (torch.inf if number == BAD else 1.0)
        scaler.scale(loss).backward()
        if is_clipped:
            scaler.unscale_(attached)
        scaler.step(attached)
        scaler.update()
        attached.zero_grad()
    return sparse, cursor


def check_alike(one: SparseModel, other: SparseModel) -> None:
    for name, mask in one.masks.items():
        assert torch.equal(mask, other.masks[name]), name
    for (name, mine), its in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, its), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", PLANS)
def test_a_scaled_loss_trains_a_fused_optimizer_to_the_bits_of_a_plain_one(method: str, optimizer: str) -> None:
    """A scale is a power of two, by which nothing is rounded; every third step it is another."""
    plain, _ = trained(method, optimizer, range(ITERATIONS), is_scaled=False)
    scaled, cursor = trained(method, optimizer, range(ITERATIONS), growth_interval=3)
    assert cursor.is_over
    check_alike(plain, scaled)


@pytest.mark.parametrize("is_clipped", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", PLANS)
@pytest.mark.parametrize("when", [3, 4])
def test_steps_a_fused_optimizer_skips_do_not_count(method: str, optimizer: str, when: int, is_clipped: bool) -> None:
    """With an infinite batch in between, also just before an edit that looks at gradients, all ends as without it."""
    if is_clipped and method == "snfs":
        pytest.skip("nobody tells what gradients were scaled by that are unscaled before the step, and it changes here")
    without, _ = trained(method, optimizer, range(ITERATIONS - 1), is_clipped=is_clipped)
    numbers = [*range(when), BAD, *range(when, ITERATIONS - 1)]
    skipped, cursor = trained(method, optimizer, numbers, is_clipped=is_clipped)
    assert cursor.iteration == ITERATIONS - 1
    check_alike(without, skipped)
