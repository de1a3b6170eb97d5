"""Compact storage has no gradients of gradients, as a gradient penalty asks for."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import growprune as gp
from growprune.storage import kernels


class Twice(nn.Module):
    """Gives a layer with two inputs the same one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Bilinear(8, 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x, x)  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(8, 16), (3, 8)),
    "convolution": (lambda: nn.Conv2d(4, 8, 3), (2, 4, 5, 5)),
    "weight read as an attribute": (Twice, (3, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_second_derivatives_are_refused(name: str) -> None:
    make, shape = MODELS[name]
    sparse = gp.SparseModel(make(), sparsity=0.5, storage="compact")
    sparse.prune()
    parameters = list(sparse.model.parameters())
    with pytest.raises(RuntimeError, match="compact storage has no second derivatives"):
        torch.autograd.grad(sparse.model(torch.randn(shape)).square().sum(), parameters, create_graph=True)


def test_the_operators_pass_the_checks_of_torch() -> None:
    bits = kernels.pack(torch.tensor([True, False, True, True]))
    offsets, count = kernels.block_offsets(bits)
    expanded = torch.randn(count), bits, offsets, 4, torch.float32, 1
    compressed = torch.randn(4), bits, offsets, count, torch.float32, 1
    for operator, arguments in ((torch.ops.growprune.expand, expanded), (torch.ops.growprune.compress, compressed)):
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))
