"""Growth by gradient when training diverges: one line, in both storages, whatever bits a NaN has."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import growprune as gp
from growprune import GrowpruneError
from growprune.masks.ranking import magnitude_keys

NANS = {"all bits": 0x7FFFFFFF, "all bits and a sign": -1, "usual": 0x7FC00000}


def nan_of(bits: int) -> Tensor:
    return torch.tensor([bits], dtype=torch.int32).view(torch.float32)


def begun(storage: str) -> tuple[Any, gp.Cursor, torch.optim.Optimizer]:
    torch.manual_seed(0)
    sparse = gp.SparseModel(nn.Linear(8, 8), sparsity=0.5, allocation="uniform", storage=storage)
    plan = gp.methods.rigl(gp.Partition.contiguous(sparse.model, 1), sparsity=0.5, iterations=2, every=1, until=1.0)
    cursor = gp.Cursor(sparse, plan)
    return sparse, cursor, cursor.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.1))


def backward(sparse: Any, gradient: Tensor) -> None:
    sparse.model.zero_grad()
    sparse.model(torch.ones(1, 8)).backward(gradient.expand(1, 8).clone())


@pytest.mark.parametrize("nan", NANS)
@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_gradients_that_are_no_numbers_are_refused_when_weights_grow_by_them(storage: str, nan: str) -> None:
    sparse, _, optimizer = begun(storage)
    backward(sparse, nan_of(NANS[nan]))
    for parameter in sparse.model.parameters():
        parameter.grad.zero_()  # which were seen already: the weights stay finite
    with pytest.raises(GrowpruneError, match=r"weight has NaN or infinity, .* training diverged"):
        optimizer.step()


@pytest.mark.parametrize("nan", NANS)
@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_backward_pass_without_a_step_may_have_any_gradients(storage: str, nan: str) -> None:
    """A GradScaler makes no step when the scaled loss was too large."""
    sparse, cursor, optimizer = begun(storage)
    backward(sparse, nan_of(NANS[nan]))
    backward(sparse, torch.ones(1))
    optimizer.step()
    assert cursor.position == 1
    assert sparse.num_alive == 32


@pytest.mark.parametrize("dtype, whole, bits", [(torch.float32, torch.int32, 31), (torch.float64, torch.int64, 63)])
def test_the_key_of_a_nan_is_above_infinity_and_below_that_of_live_weights(
    dtype: torch.dtype, whole: torch.dtype, bits: int
) -> None:
    nans = torch.tensor([(1 << bits) - 1, -1], dtype=whole).view(dtype)
    infinity = int(magnitude_keys(torch.tensor(float("inf"), dtype=dtype)))
    assert all(infinity < key < (1 << bits) - 1 for key in magnitude_keys(nans).tolist())
