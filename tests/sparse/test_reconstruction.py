"""prune_pretrained(reconstruct=..., steps=...)."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import growprune as gp
from growprune.sparse import reconstruction

ENDS = ["first.0.weight", "head.weight"]


class Residual(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(size, 2 * size), nn.ReLU(inplace=True), nn.Linear(2 * size, size))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        x.mul_(scale)  # writes to its input
        return x + self.inner(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16))
        self.blocks = nn.ModuleList([Residual(16), Residual(16)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        out: Tensor = self.head(x)
        return out


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    net = Net()
    net.train()(torch.randn(256, 12))  # gives the norm its averages
    return net


@pytest.fixture
def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(32, 12) for _ in range(8)]


def errors(pruned: nn.Module, dense: nn.Module) -> float:
    torch.manual_seed(2)
    x = torch.randn(512, 12)
    with torch.no_grad():
        return float((pruned.eval()(x) - dense.eval()(x)).square().mean())


@pytest.mark.parametrize("by", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize(("sparsity", "pattern"), [(0.7, "unstructured"), (0.5, "2:4"), (0.75, "1x4")])
def test_outputs_come_closer_to_dense_and_zeros_stay(
    net: Net, batches: list[Tensor], by: str, sparsity: float, pattern: str
) -> None:
    how: dict[str, Any] = {"sparsity": sparsity, "pattern": pattern, "by": by, "keep_dense": ENDS}
    plain, better = copy.deepcopy(net), copy.deepcopy(net)
    alone = gp.prune_pretrained(plain, batches, **how)
    trained = gp.prune_pretrained(better, batches, reconstruct=200, **how)
    assert errors(better, net) < 0.8 * errors(plain, net)
    assert trained.num_alive == alone.num_alive
    assert trained.is_at_target
    for name, mask in trained.masks.items():
        assert (better.get_parameter(name)[~mask] == 0).all()


def test_a_linear_layer_comes_close_to_least_squares() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 8) @ torch.randn(8, 8)  # correlated inputs
    layer = nn.Linear(8, 3, bias=False)
    dense = layer.weight.detach().clone()
    sparse = gp.prune_pretrained(
        nn.Sequential(layer), [x], sparsity=0.5, by="magnitude", keep_dense=[], reconstruct=2000
    )
    mask = sparse.masks["0.weight"]
    best = 0.0
    for row in range(3):
        target, kept = x @ dense[row], x[:, mask[row]]
        best += float((target - kept @ torch.linalg.lstsq(kept, target).solution).square().sum())
    reached = float((x @ (layer.weight.detach() - dense).T).square().sum())
    cut = float((x @ (dense * ~mask).T).square().sum())
    assert best < 0.7 * cut  # there is something to gain
    assert reached < 1.05 * best


def test_compact_storage_gives_the_same_weights(net: Net, batches: list[Tensor]) -> None:
    how: dict[str, Any] = {"sparsity": 0.7, "by": "wanda", "reconstruct": 30, "keep_dense": ENDS}
    masked, compact = copy.deepcopy(net), copy.deepcopy(net)
    gp.prune_pretrained(masked, batches, **how)
    gp.prune_pretrained(compact, batches, storage="compact", **how).to_dense_()
    for name, value in masked.state_dict().items():
        torch.testing.assert_close(compact.state_dict()[name], value, msg=name)


def test_only_one_block_and_what_trains_changes(net: Net, batches: list[Tensor]) -> None:
    net.blocks[0].inner[2].bias.requires_grad_(False)
    net.blocks[1].inner[0].weight.grad = gradient = torch.ones(32, 16)
    before = copy.deepcopy(net.state_dict())
    net.train()
    gp.prune_pretrained(
        net, batches, sparsity=0.7, by="magnitude", reconstruct=20, keep_dense=["first.*", "blocks.1.*", "head.*"]
    )
    changed = {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"blocks.0.inner.0.weight", "blocks.0.inner.0.bias", "blocks.0.inner.2.weight"}
    assert net.training
    assert net.blocks[1].inner[0].weight.grad is gradient
    assert net.blocks[0].inner[0].weight.grad is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_half_precision_is_trained_in_full(net: Net, batches: list[Tensor]) -> None:
    net.bfloat16()
    halves = [batch.bfloat16() for batch in batches]
    plain, better = copy.deepcopy(net), copy.deepcopy(net)
    how: dict[str, Any] = {"sparsity": 0.7, "by": "magnitude", "keep_dense": ENDS}
    gp.prune_pretrained(plain, halves, **how)
    gp.prune_pretrained(better, halves, reconstruct=200, **how)
    assert better.blocks[0].inner[0].weight.dtype is torch.bfloat16
    exact = copy.deepcopy(net).float()
    assert errors(better.float(), exact) < 0.8 * errors(plain.float(), exact)


def test_training_that_does_not_help_is_taken_back(
    net: Net, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"sparsity": 0.5, "by": "wanda", "keep_dense": ENDS}
    other = copy.deepcopy(net)
    gp.prune_pretrained(other, batches, **how)
    monkeypatch.setattr(reconstruction, "LEARNING_RATE", 1e3)
    gp.prune_pretrained(net, batches, reconstruct=3, **how)
    for name, value in other.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name


def test_a_weight_outside_of_any_module_call_is_named() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))
            self.last = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(nn.functional.linear(x, self.weight))
            return out

    with pytest.warns(UserWarning, match="weight") as found:
        sparse = gp.prune_pretrained(
            Functional(), [torch.randn(32, 8)], include=["weight"], keep_dense=[], reconstruct=5
        )
    assert len(found) == 1
    assert sparse.is_at_target


def test_several_steps_reach_the_same_sparsity_by_other_choices(net: Net, batches: list[Tensor]) -> None:
    how: dict[str, Any] = {"sparsity": 0.8, "by": "sparsegpt", "keep_dense": ENDS}
    once = gp.prune_pretrained(copy.deepcopy(net), batches, **how)
    seen: list[tuple[int, int]] = []
    slowly = gp.prune_pretrained(net, batches, steps=4, progress=lambda *done: seen.append(done), **how)
    assert slowly.num_alive == once.num_alive
    assert any(not torch.equal(slowly.masks[name], mask) for name, mask in once.masks.items())
    assert seen == [(0, 2), (1, 2), (2, 2)] * 4


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"reconstruct": -1}, "-1"),
        ({"reconstruct": 0.5}, "0.5"),
        ({"steps": 0}, "0"),
        ({"steps": 2, "pattern": "2:4"}, "2:4"),
        ({"reconstruct": 8, "by": "magnitude", "allocation": "global"}, "global"),
    ],
)
def test_wrong_arguments_change_nothing(net: Net, batches: list[Tensor], given: dict[str, Any], value: str) -> None:
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(gp.GrowpruneError, match=value):
        gp.prune_pretrained(net, batches, **given)
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in before.items())


def test_a_block_too_large_to_keep_is_refused_before_anything_changes(
    net: Net, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconstruction, "LIMIT", 8 * 32 * 16 * 4 * 2 - 1)  # one byte less than a residual block
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(gp.GrowpruneError, match=r"GiB for (first|blocks)"):
        gp.prune_pretrained(net, batches, reconstruct=8)
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in before.items())
    gp.prune_pretrained(net, batches)
