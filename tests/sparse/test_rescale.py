"""A random first mask keeps activations of models without normalization as large as they were."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import growprune as gp
from growprune.masks.layers import is_normalized


def mlp(depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 10))


def pruned(masks: dict[str, Tensor], *, rescaled: bool) -> dict[str, Tensor]:
    """The weights of `mlp(2)` under these masks, by hand."""
    model = mlp(2)
    scales = {name: math.sqrt(mask.numel() / int(mask.sum())) if rescaled else 1.0 for name, mask in masks.items()}
    return {name: model.get_parameter(name).detach() * mask * scales[name] for name, mask in masks.items()}


@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.parametrize(("pattern", "allocation"), [("unstructured", "uniform"), ("2:4", "uniform"), ("1x8", "erk")])
@pytest.mark.parametrize("rescale", [True, False])
def test_a_random_mask_divides_what_it_keeps_by_the_root_of_the_density(
    storage: str, pattern: str, allocation: str, rescale: bool
) -> None:
    settings: Any = {"sparsity": 0.5, "pattern": pattern, "allocation": allocation, "storage": storage}
    sparse = gp.SparseModel(mlp(2), rescale=rescale, **settings)
    sparse.prune(by=gp.By.RANDOM)
    masks = sparse.masks
    plain = sparse.to_dense_()
    for name, expected in pruned(masks, rescaled=rescale).items():
        torch.testing.assert_close(plain.get_parameter(name).detach(), expected)


def test_pruning_by_magnitude_and_growing_change_no_weight_that_stays() -> None:
    sparse = gp.SparseModel(mlp(2), sparsity=0.5, rescale=True)
    sparse.prune(by=gp.By.MAGNITUDE)
    for name, expected in pruned(sparse.masks, rescaled=False).items():
        assert torch.equal(sparse.model.get_parameter(name), expected)
    before = {name: parameter.detach().clone() for name, parameter in sparse.model.named_parameters()}
    sparse.grow(to=0.2)
    assert all(torch.equal(sparse.model.get_parameter(name), weight) for name, weight in before.items())


@pytest.mark.parametrize("method", ["gradual_gap", "rigl", "static_random"])
def test_sparsify_keeps_activations_as_large_in_a_model_without_normalization(method: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256, bias=False), nn.ReLU())))
    x = torch.randn(256, 256)
    before = model(x).std().item()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gp.sparsify(model, optimizer, method, sparsity=0.9, iterations=600, keep_dense=[])
    assert 0.3 < model(x).std().item() / before < 3  # without it: 0.001 at a density of 0.1 in six layers


NORMS = (
    "BatchNorm2d SyncBatchNorm LlamaRMSNorm GroupNormAct Norm LayerNorm2d LayerNormFp32 GroupNorm1 MambaRMSNormGated"
)
OTHERS = "NormalMLP NormFreeNet _WeightNorm _SpectralNorm Linear Denormalize NormedLinear"


@pytest.mark.parametrize(
    ("name", "expected"), [*((name, True) for name in NORMS.split()), *((name, False) for name in OTHERS.split())]
)
def test_norm_layers_are_known_by_their_name(name: str, expected: bool) -> None:
    assert is_normalized(nn.Sequential(type(name, (nn.Module,), {})())) is expected


def mlp_of_modules() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


def test_sparse_init_rescales_unless_a_model_is_normalized() -> None:
    def largest(model: nn.Module) -> float:
        return max(p.detach().abs().max().item() for name, p in model.named_parameters() if name.endswith("0.weight"))

    bound = 1 / math.sqrt(32)  # of nn.Linear's initial weights
    assert largest(gp.sparse_init(mlp_of_modules, sparsity=0.75).to_dense_()) > 1.5 * bound
    normalized = gp.sparse_init(lambda: nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64)), sparsity=0.75)
    assert largest(normalized.to_dense_()) <= bound


def test_rescale_is_asked_for_or_follows_from_the_norms() -> None:
    def factor(rescale: object) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 10), nn.LayerNorm(10), nn.Linear(10, 2))
        before = model[0].weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        gp.sparsify(model, optimizer, "static_random", sparsity=0.75, iterations=4, rescale=rescale)
        kept = model[0].weight.detach() != 0
        return float((model[0].weight.detach()[kept] / before[kept]).mean())

    assert [round(factor(how), 4) for how in ("auto", False, True)] == [1.0, 1.0, 2.0]
    with pytest.raises(gp.GrowpruneError, match="'always'"):
        factor("always")
