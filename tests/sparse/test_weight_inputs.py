"""What every kind of layer is multiplied by is seen: with it, the size of an output is known from the weights alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stacked import Conv1D
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.masks.layers import prunable_weights
from growprune.sparse.calibration import Calibration, looking_only
from growprune.sparse.layer_choice import to_matrix
from growprune.sparse.model import SparseModel


def statistics(
    model: nn.Module, *batches: Any, with_products: bool = True, forward: Callable[..., Any] | None = None
) -> dict[str, Tensor]:
    weights = prunable_weights(model)
    block_of = dict.fromkeys([weight.name for weight in weights], "all")
    calibration = Calibration(model, weights, batches, block_of=block_of, forward=forward)
    with looking_only(model):
        calibration.look()
        return calibration.inputs("all", with_products=with_products)


def squared_output(model: nn.Module, products: Tensor) -> Tensor:
    """The sum of w H w^T over the rows of the model's only weight."""
    (weight,) = prunable_weights(model)
    matrix = to_matrix(model.get_parameter(weight.parameter).detach(), weight)
    rows = matrix.view(len(products), -1, matrix.shape[1])
    return torch.einsum("grc,gcd,grd->", rows, products, rows)


LAYERS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Linear(4, 3, bias=False), (2, 5, 4)),
    (lambda: nn.Linear(4, 3, bias=False), (4,)),
    (lambda: Conv1D(3, 4), (6, 4)),
    (lambda: nn.Conv1d(4, 8, 3, stride=2, padding=1, bias=False), (3, 4, 9)),
    (lambda: nn.Conv2d(4, 8, (3, 2), (2, 1), (1, 2), (1, 2), bias=False), (3, 4, 9, 8)),
    (lambda: nn.Conv2d(4, 8, 3, groups=2, bias=False), (3, 4, 9, 8)),
    (lambda: nn.Conv2d(4, 8, 3, groups=4, padding="same", padding_mode="reflect", bias=False), (3, 4, 9, 8)),
    (lambda: nn.Conv2d(4, 8, 3, bias=False).to(memory_format=torch.channels_last), (3, 4, 9, 8)),
    (lambda: nn.Conv3d(4, 4, 2, groups=2, bias=False), (2, 4, 5, 4, 3)),
]


@pytest.mark.parametrize(("make", "shape"), LAYERS)
def test_the_products_of_inputs_give_the_size_of_the_output(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    layer, x = make().double(), torch.randn(shape, dtype=torch.float64)
    (products,) = statistics(layer, x).values()
    torch.testing.assert_close(squared_output(layer, products), layer(x).square().sum().detach())
    (squares,) = statistics(layer, x, with_products=False).values()
    torch.testing.assert_close(squares, products.diagonal(dim1=1, dim2=2))


def test_transposed_convolution_counts_as_not_reached() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.ConvTranspose1d(4, 8, 3))
    assert list(statistics(model, torch.randn(3, 4, 9))) == ["0.weight"]


def test_inputs_are_added_up_over_batches_in_chunks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(3, 4, 3).double(), torch.randn(6, 3, 5, 5, dtype=torch.float64)
    (whole,) = statistics(layer, x).values()
    monkeypatch.setattr("growprune.sparse.calibration.CHUNK", 1)
    (parts,) = statistics(layer, x[:1], x[1:]).values()
    torch.testing.assert_close(parts, whole)


def test_queries_keys_and_values_have_inputs_of_their_own() -> None:
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(8, 2), torch.randn(5, 3, 8)
    expected = torch.einsum("lni,lnj->ij", x, x)
    found = statistics(layer, x, forward=lambda layer, x: layer(x, x, x))
    assert list(found) == [*(f"in_proj_weight[{letter}]" for letter in "qkv"), "out_proj.weight"]
    for letter in "qkv":
        torch.testing.assert_close(found[f"in_proj_weight[{letter}]"][0], expected)
    found = statistics(layer, x, forward=lambda layer, x: layer(x, 2 * x, 3 * x))
    for letter, factor in zip("qkv", (1, 4, 9), strict=True):
        torch.testing.assert_close(found[f"in_proj_weight[{letter}]"][0], factor * expected)


class Mixture(nn.Module):
    """Four experts in one operation, of which the third has no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 16, 8, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        offsets = torch.tensor([8, 16, 16, 24], dtype=torch.int32)
        return F.grouped_mm(x, self.up.transpose(1, 2), offs=offsets)


def test_experts_in_one_operation_are_told_apart_in_float32() -> None:
    torch.manual_seed(0)
    x = torch.randn(24, 8, dtype=torch.bfloat16)
    found = statistics(Mixture(), x)
    assert list(found) == ["up[0]", "up[1]", "up[3]"]
    torch.testing.assert_close(found["up[3]"][0], x[16:].float().T @ x[16:].float())


def test_a_weight_that_is_used_twice_has_the_inputs_of_both() -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(3, 4)
    (found,) = statistics(layer, x, forward=lambda layer, x: layer(layer(x))).values()
    hidden = layer(x).detach()
    torch.testing.assert_close(found[0], x.T @ x + hidden.T @ hidden)


def test_copies_under_autocast_are_known() -> None:
    model, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(12)]), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)  # which may cache copies
        found = statistics(model, x)
    assert len(found) == 12
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}


def test_compact_weights_are_known() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(3, 3, 1)), torch.randn(2, 3, 8)
    SparseModel(model, sparsity=0.5, storage="compact").prune()
    assert list(statistics(model, x)) == ["0.weight", "1.weight"]


def test_weights_that_share_a_storage_are_told_apart() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)), torch.randn(3, 4)
    for layer, values in zip(model, torch.randn(2, 4, 4), strict=True):
        layer.weight = nn.Parameter(values)
    found, hidden = statistics(model, x), model[0](x).detach()
    torch.testing.assert_close(found["0.weight"][0], x.T @ x)
    torch.testing.assert_close(found["1.weight"][0], hidden.T @ hidden)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_show_their_inputs_and_their_states(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    layer, x = kind(4, 3), torch.randn(5, 2, 4)
    found = statistics(layer, x)
    assert list(found) == ["weight_ih_l0", "weight_hh_l0"]
    torch.testing.assert_close(found["weight_ih_l0"][0], torch.einsum("lni,lnj->ij", x, x))
    states = layer(x)[0][:-1].detach()  # the first step has a state of zeros, and nobody sees the last
    torch.testing.assert_close(found["weight_hh_l0"][0], torch.einsum("lni,lnj->ij", states, states))
