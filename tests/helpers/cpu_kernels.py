"""What tests of the CPU kernels share."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from growprune.deployment.cpu import library
from growprune.deployment.cpu.prepared import Activation

GAP = 3
"""Columns between the rows of tensors, which nobody may read or write."""


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    try:
        library.find_compiler()
    except library.BuildError as error:
        pytest.skip(f"the kernels cannot be built here: {error}")
    library.library()


def spaced(tensor: Tensor, gap: float = float("nan")) -> Tensor:
    """The same matrix, its rows apart, and something between them that must not matter."""
    wide = torch.full((tensor.shape[0], tensor.shape[1] + GAP), gap)
    wide[:, : tensor.shape[1]] = tensor
    return wide[:, : tensor.shape[1]]


def finish(sums: Tensor, activation: Activation) -> Tensor:
    ends = {Activation.NONE: sums, Activation.RELU: sums.relu(), Activation.GELU: F.gelu(sums)}
    return {**ends, Activation.RELU6: F.relu6(sums)}[activation]
