"""The FLOPs rule, against counts made by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.sparse.flops import Flops, count_flops
from growprune.sparse.model import SparseModel

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", "meta", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


def count(model: nn.Module, *shapes: tuple[int, ...], device: str = "cpu") -> Flops:
    return count_flops(model.to(device), tuple(torch.zeros(shape, device=device) for shape in shapes))


@pytest.mark.parametrize("device", DEVICES)
def test_a_small_cnn_counted_by_hand(device: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),  # 8 * 3 * 9 weights at 6 * 6 positions
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3, stride=2),  # 4 * 8 * 9 weights at 2 * 2 positions
        nn.Flatten(),
        nn.Linear(16, 10),  # 160 weights once
    )
    flops = count(model, (5, 3, 6, 6), device=device)
    expected = {"0.weight": 2 * 5 * 36 * 216, "3.weight": 2 * 5 * 4 * 288, "5.weight": 2 * 5 * 160}
    assert flops.by_weight == dict.fromkeys(("1.weight", "1.bias", "3.bias", "5.bias"), 0) | expected
    assert flops.dense == 77760 + 11520 + 1600


def test_a_sparse_weight_costs_its_live_elements() -> None:
    flops = count(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)), (3, 8))
    assert flops.dense == 2 * 3 * (32 + 8)
    assert flops.at({}) == 240
    assert flops.at({"0.weight": 0.25}) == 2 * 3 * (8 + 8)
    assert flops.at({"0.weight": 0, "1.weight": 3 / 8}) == 2 * 3 * 3
    assert flops.of("1.weight", 3 / 8) == 18


def test_a_density_of_no_weight_is_an_error_that_lists_the_weights() -> None:
    flops = count(nn.Linear(8, 4), (3, 8))
    with pytest.raises(ValueError, match="densities has 'fc', which is not a weight; the weights are weight, bias"):
        flops.at({"fc": 0.5})


@pytest.mark.parametrize(
    ("layer", "shape", "uses"),
    [
        (nn.Conv1d(4, 6, 3), (2, 4, 9), 2 * 7),
        (nn.Conv2d(4, 6, 3, groups=2), (2, 4, 5, 5), 2 * 9),
        (nn.Conv2d(4, 4, 3, padding=1, stride=2, groups=4), (2, 4, 8, 8), 2 * 16),
        (nn.Conv3d(2, 3, 2, dilation=2), (1, 2, 4, 4, 4), 8),
        (nn.ConvTranspose1d(4, 6, 3, stride=2), (2, 4, 5), 2 * 5),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 5, 5), 2 * 25),
        (nn.Linear(4, 6), (2, 3, 5, 4), 30),
        (nn.Linear(4, 6, bias=False), (4,), 1),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_an_element_costs_two_operations_wherever_it_is_used(
    layer: nn.Module, shape: tuple[int, ...], uses: int, device: str
) -> None:
    flops = count(layer, shape, device=device)
    assert flops.by_weight["weight"] == flops.dense == 2 * uses * layer.weight.numel()


@pytest.mark.parametrize("device", DEVICES)
def test_a_transformer_layer_counted_by_hand(device: str) -> None:
    batch, length, width, hidden = 2, 5, 16, 32
    layer = nn.TransformerEncoderLayer(width, 4, hidden, batch_first=True)
    flops = count(layer, (batch, length, width), device=device)
    square = 2 * batch * length * width * width
    assert {name: cost for name, cost in flops.by_weight.items() if cost} == {
        **{f"self_attn.in_proj_weight[{x}]": square for x in "qkv"},
        "self_attn.out_proj.weight": square,
        "linear1.weight": 2 * batch * length * width * hidden,
        "linear2.weight": 2 * batch * length * hidden * width,
    }
    scores_and_mixing = 2 * 2 * batch * length * length * width
    assert flops.dense == sum(flops.by_weight.values()) + scores_and_mixing


@pytest.mark.parametrize("device", DEVICES)
def test_attention_to_another_sequence_uses_k_and_v_as_often_as_that_is_long(device: str) -> None:
    flops = count(nn.MultiheadAttention(8, 2), (3, 1, 8), (7, 1, 8), (7, 1, 8), device=device)
    costs = [flops.by_weight[name] for name in (*(f"in_proj_weight[{x}]" for x in "qkv"), "out_proj.weight")]
    assert costs == [2 * 3 * 64, 2 * 7 * 64, 2 * 7 * 64, 2 * 3 * 64]
    apart = count(nn.MultiheadAttention(8, 2, kdim=4, vdim=6), (3, 1, 8), (7, 1, 4), (7, 1, 6), device=device)
    costs = [apart.by_weight[f"{x}_proj_weight"] for x in "qkv"]
    assert costs == [2 * 3 * 64, 2 * 7 * 32, 2 * 7 * 48]


def test_scaled_dot_product_attention_is_counted_on_the_cpu() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))

    assert count(Attention(), (1, 5, 8)).dense == 2 * 5 * 192 + 2 * 2 * 5 * 5 * 8


def test_a_module_called_twice_and_a_weight_used_twice_cost_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.again, self.one, self.other = (nn.Linear(4, 4, bias=False) for _ in range(3))
            self.other.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.one(self.again(self.again(x))))

    assert count(Twice(), (1, 4)).by_weight == {"again.weight": 64, "one.weight": 64}


def test_weights_are_known_however_they_are_used() -> None:
    class Direct(nn.Module):
        """As shifted-window transformers do, and under autocast, which copies weights."""

        def __init__(self) -> None:
            super().__init__()
            self.functional = nn.Linear(4, 4)
            self.einsum = nn.Parameter(torch.zeros(3, 4))
            self.cast = nn.MultiheadAttention(4, 1)
            self.unused = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = F.linear(x, self.functional.weight, self.functional.bias)
            with torch.autocast("cpu", torch.bfloat16):
                return torch.einsum("bli,oi->blo", self.cast(x, x.clone(), x)[0], self.einsum)

    flops = count(Direct(), (5, 2, 4))
    projections = dict.fromkeys((f"cast.in_proj_weight[{x}]" for x in "qkv"), 320)
    expected = {"functional.weight": 320, **projections, "cast.out_proj.weight": 320, "einsum": 240}
    assert {name: cost for name, cost in flops.by_weight.items() if cost} == expected
    assert flops.dense == 320 + 960 + 320 + 240 + 2 * 2 * 2 * 5 * 5 * 4


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
@pytest.mark.parametrize("pattern", ["unstructured", "1x4"])
def test_compact_storage_costs_what_masked_storage_does(pattern: str, device: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.up = nn.Conv2d(4, 8, 3), nn.ConvTranspose2d(8, 4, 2)
            self.attention, self.lone = nn.MultiheadAttention(4, 2), nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.up(self.conv(x)).flatten(2).permute(2, 0, 1)
            return self.attention(x, x[:7], x[:7])[0] @ self.lone

    model = Net()
    plain = count(model, (2, 4, 6, 6), device=device)
    assert plain.by_weight["attention.in_proj_weight[k]"] == 2 * 2 * 7 * 16
    sparse = SparseModel(model, sparsity=0.5, pattern=pattern, include=["lone"], storage="compact")
    sparse.prune()
    assert model._parameters["lone"].dim() == 1
    assert count(model, (2, 4, 6, 6), device=device) == plain


def test_a_weight_repeated_along_a_batch_is_known() -> None:
    class Batched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.fc = nn.MultiheadAttention(4, 1), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            rows = [row.expand(len(x), 4, 4) for row in self.attention.in_proj_weight.chunk(3)]
            return torch.bmm(torch.bmm(x, rows[1]), self.fc.weight.t().expand(len(x), 4, 3))

    flops = count(Batched(), (5, 2, 4))
    assert [flops.by_weight[f"attention.in_proj_weight[{x}]"] for x in "qkv"] == [0, 320, 0]
    assert flops.by_weight["fc.weight"] == 240


def test_a_two_dimensional_bias_is_not_charged() -> None:
    class Affine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.matrix = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(5, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.table, x, self.matrix)

    assert count(Affine(), (3, 5)).by_weight == {"table": 0, "matrix": 2 * 3 * 20}


def test_an_example_may_be_a_tensor_positional_or_keyword_arguments() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
            return self.fc(a if b is None else a + b)

    x = torch.zeros(1, 4)
    examples: list[Any] = [x, (x,), (x, x), {"a": x, "b": x}]
    assert [count_flops(Sum(), example).dense for example in examples] == [32] * 4


class Careless(nn.Module):
    """Does in eval mode what it should not: changes a buffer and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        assert not self.training
        assert not torch.is_grad_enabled()
        return self.norm(self.fc(x)) + torch.rand(1)


def test_the_model_and_the_world_are_left_as_they_were() -> None:
    model = Careless()
    model.norm.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    rng = torch.get_rng_state()
    fast = torch.backends.mha.get_fastpath_enabled()
    count(model, (3, 4))
    assert torch.equal(torch.get_rng_state(), rng)
    assert (model.training, model.fc.training, model.norm.training) == (True, True, False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert torch.backends.mha.get_fastpath_enabled() is fast is True
    assert torch.is_grad_enabled()


def test_a_forward_pass_that_fails_leaves_the_model_as_it_was_too() -> None:
    model = Careless()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        count(model, (3, 5))
    assert model.training
    assert model.calls == 0
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bilinear_uses_each_element_once_an_example(device: str) -> None:
    model = nn.Bilinear(4, 5, 3).to(device)
    flops = count_flops(model, (torch.zeros(7, 4, device=device), torch.zeros(7, 5, device=device)))
    assert flops.by_weight["weight"] == flops.dense == 2 * 7 * 60


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_an_expert_costs_the_examples_it_is_given(storage: str) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts, self.up = 2, nn.Parameter(torch.randn(2, 6, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([F.linear(x[:5], self.up[0]), F.linear(x[5:], self.up[1])])

    sparse = SparseModel(Experts(), sparsity=0.5, storage=storage)
    sparse.prune()
    flops = count(sparse.model, (7, 4))
    assert flops.by_weight == {"up[0]": 2 * 5 * 24, "up[1]": 2 * 2 * 24}
    assert sum(flops.by_weight.values()) == flops.dense == 2 * 7 * 24
    assert [row.flops_sparse for row in sparse.summary(torch.zeros(7, 4)).rows] == [120, 48]


def test_experts_that_multiply_at_once_share_the_cost() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts, self.is_transposed = 2, True
            self.up = nn.Parameter(torch.randn(2, 8, 16))

        def forward(self, x: Tensor) -> Tensor:
            ends = torch.tensor([8, 16], dtype=torch.int32)
            return torch._grouped_mm(x, self.up, offs=ends) + torch.bmm(x.view(2, 8, 8), self.up).view(16, 16)

    flops = count(Experts(), (16, 8))
    assert flops.by_weight == {"up[0]": 2 * 2 * 8 * 128, "up[1]": 2 * 2 * 8 * 128}
