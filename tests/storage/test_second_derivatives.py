"""Gradients of gradients with compact storage, as a gradient penalty asks for: equal to those of masked storage."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import growprune as gp
from growprune.storage import block_products, kernels


class Twice(nn.Module):
    """Gives a layer with two inputs the same one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Bilinear(8, 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x))
        return self.outer(x, x)  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4, bias=False)), (3, 8)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.Tanh(), nn.ConvTranspose2d(8, 4, 2)), (2, 4, 5, 5)),
    "weight read as an attribute": (Twice, (3, 8)),
}


def penalty_gradients(
    model: nn.Module, storage: str, shape: tuple[int, ...], pattern: str = "unstructured"
) -> list[Tensor]:
    """The gradients of a gradient penalty, of live weights only."""
    sparse = gp.SparseModel(copy.deepcopy(model), sparsity=0.5, storage=storage, pattern=pattern)
    sparse.prune()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    (slope,) = torch.autograd.grad(sparse.model(x).square().sum(), x, create_graph=True)
    trained = dict(sparse.model.named_parameters())
    gradients = torch.autograd.grad(slope.square().sum(), list(trained.values()), allow_unused=True)
    of_name = {name: gradient for name, gradient in zip(trained, gradients, strict=True) if gradient is not None}
    is_dense = {name: name in sparse.masks and g.shape == sparse.masks[name].shape for name, g in of_name.items()}
    return [g[sparse.masks[name]] if is_dense[name] else g for name, g in of_name.items()]


@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_penalty_has_the_same_gradients_as_with_masked_storage(name: str) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    expected, found = (penalty_gradients(model, storage, shape) for storage in ("masked", "compact"))
    assert len(found) >= 2
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one)


def test_products_over_live_blocks_are_left_out_where_a_second_derivative_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_products, "WAY", "sparse")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    expected, found = (penalty_gradients(model, storage, (3, 64), "32x32") for storage in ("masked", "compact"))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("group", [1, 2])
def test_the_gradient_of_expanding_is_to_compress_and_the_other_way_round(group: int) -> None:
    mask = torch.tensor([True, False, False, True, True]).repeat_interleave(group)
    bits = kernels.pack(mask, group=group)
    offsets, num_groups = kernels.block_offsets(bits)
    count = num_groups * group
    values = torch.randn(count, dtype=torch.float64, requires_grad=True)
    dense = torch.randn(mask.numel(), dtype=torch.float64, requires_grad=True)

    def expand(values: Tensor) -> Tensor:
        return kernels.expand(values, bits, offsets, mask.numel(), torch.float64, group)

    def compress(dense: Tensor) -> Tensor:
        return kernels.compress(dense, bits, offsets, count, torch.float64, group)

    for run, operand in ((expand, values), (compress, dense)):
        assert torch.autograd.gradcheck(run, (operand,))
        assert torch.autograd.gradgradcheck(lambda x, run=run: run(x).pow(2), (operand,))


def test_the_operators_pass_the_checks_of_torch() -> None:
    bits = kernels.pack(torch.tensor([True, False, True, True]))
    offsets, count = kernels.block_offsets(bits)
    expanded = (torch.randn(count, requires_grad=True), bits, offsets, 4, torch.float32, 1)
    compressed = (torch.randn(4, requires_grad=True), bits, offsets, count, torch.float32, 1)
    torch.library.opcheck(torch.ops.growprune.expand.default, expanded)
    torch.library.opcheck(torch.ops.growprune.compress.default, compressed)
