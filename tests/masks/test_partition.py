"""Partitions: every tensor in exactly one part, the parts in order and as equal as can be, blocks left whole."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from growprune.masks.layers import layer_weights
from growprune.masks.partition import Partition
from growprune.plan import Part


class BasicBlock(nn.Module):
    """A residual block as torchvision writes one."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        if inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    def __init__(self, *depths: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(*(BasicBlock(4, 4) for _ in range(depths[0])))
        self.layer2 = nn.Sequential(*(BasicBlock(4 if i == 0 else 8, 8) for i in range(depths[1])))
        self.fc = nn.Linear(8, 10)


class ConvNormActivation(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, kernel: int, groups: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, groups=groups, bias=False), nn.BatchNorm2d(outputs), nn.ReLU6()
        )


class InvertedResidual(nn.Module):
    """A residual block whose body is one Sequential, as in MobileNetV2."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.conv = nn.Sequential(
            ConvNormActivation(channels, wide, 1),
            ConvNormActivation(wide, wide, 3, groups=wide),
            nn.Conv2d(wide, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )


class MobileNet(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        blocks = [InvertedResidual(4) for _ in range(num_blocks)]
        self.features = nn.Sequential(ConvNormActivation(3, 4, 3), *blocks, ConvNormActivation(4, 16, 1))
        self.classifier = nn.Sequential(nn.Dropout(), nn.Linear(16, 10))


class Residual(nn.Sequential):
    """A Sequential that is no mere list, since it adds its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Wrapper(nn.Module):
    """What DistributedDataParallel, a training framework or a quantizer puts around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        self.register_buffer("num_calls", torch.zeros(()))


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = ResNet(2, 2)
        self.head = nn.Linear(10, 2)


class PreNorm(nn.Module):
    """Norm first, so that it is registered before its layer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.fn = nn.Linear(size, size)


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 5, 8))
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight


def transformer() -> nn.Module:
    return nn.Transformer(8, 2, num_encoder_layers=2, num_decoder_layers=3, dim_feedforward=16, batch_first=True)


def mlp(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*itertools.chain(*((nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(sizes))))


MODELS: dict[str, tuple[Callable[[], nn.Module], int, tuple[type[nn.Module], ...]]] = {
    "resnet": (lambda: ResNet(2, 2), 6, (BasicBlock,)),
    "shallow resnet": (lambda: ResNet(1, 1), 4, (BasicBlock,)),
    "mobilenet": (MobileNet, 6, (InvertedResidual,)),
    "one inverted residual": (lambda: MobileNet(1), 4, (InvertedResidual,)),
    "transformer": (transformer, 5, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)),
    "wrapped transformer": (
        lambda: Wrapper(transformer()),
        5,
        (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
    ),
    "wrapped resnet": (lambda: Wrapper(ResNet(2, 2)), 6, (BasicBlock,)),
    "wrapped shallow resnet": (lambda: Wrapper(Wrapper(ResNet(1, 1))), 4, (BasicBlock,)),
    "backbone and head": (Backbone, 7, (BasicBlock,)),
    "residual sequentials": (lambda: nn.Sequential(*(Residual(*mlp(4, 4, 4)) for _ in range(3))), 3, (Residual,)),
    "gpt": (Gpt, 4, (nn.TransformerEncoderLayer,)),
    "mlp": (lambda: mlp(4, 8, 8, 8, 2), 4, ()),
    "wrapped mlp": (lambda: Wrapper(mlp(4, 8, 8, 8, 2)), 4, ()),
    "a single layer": (lambda: nn.Linear(4, 4), 1, ()),
}
"""By name: how to make the model, how many units its blocks and lone layers are, and which modules are blocks."""

every_model = pytest.mark.parametrize("name", list(MODELS))


def tensor_names(model: nn.Module) -> list[str]:
    return [name for name, _ in (*model.named_parameters(), *model.named_buffers())]


def owners(S: Partition) -> dict[str, int]:
    return {tensor: i for i, part in enumerate(S) for tensor in part.tensors}


def layer_owners(model: nn.Module, S: Partition) -> list[int]:
    owner = owners(S)
    return [owner[weights[0].parameter] for weights in layer_weights(model).values()]


def blocks_of(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[str]:
    return [path for path, module in model.named_modules() if kinds and isinstance(module, kinds)]


def cut_by_cost(costs: Sequence[int], kappa: int) -> list[int]:
    """The part of each of some layers that cost this much."""
    model = nn.Sequential(*(nn.Linear(1, cost) for cost in costs))
    return layer_owners(model, Partition.contiguous(model, kappa))


def smallest_maximum(costs: Sequence[int], kappa: int) -> int:
    """By brute force, over all ways to cut."""
    cuts = itertools.combinations(range(1, len(costs)), kappa - 1)
    return min(max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cut, len(costs)))) for cut in cuts)


# Written by hand


def test_parts_are_numbered_and_hold_their_tensors_in_order() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    S = Partition.of(model, [["0", "1"], ["2"]])
    assert [part.name for part in S] == ["S0", "S1"]
    assert S[0].tensors == (
        *("0.weight", "0.bias", "1.weight", "1.bias"),
        *("1.running_mean", "1.running_var", "1.num_batches_tracked"),
    )
    assert S[1].tensors == ("2.weight", "2.bias")
    assert S.whole == Part("all", S[0].tensors + S[1].tensors)


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ([["0"]], r"'2\.weight' belongs to no part"),
        ([["0"], ["2", "head"]], r"prefix 'head' matches no parameter or buffer .* has 0, 2$"),
        ([["0", "2"], ["2"]], "prefix '2' is in part 0 and in part 1"),
        ([["0"], "2"], r"part 1 must be a list of names or globs, got '2'. Did you mean \['2'\]"),
    ],
)
def test_parts_that_are_none_are_refused_with_what_is_wrong(parts: list[list[str]], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Partition.of(mlp(2, 2, 2), parts)


def test_a_misspelt_prefix_is_named_with_those_that_are_near() -> None:
    model = nn.ModuleDict({"block": mlp(2, 2, 2), "head": nn.Linear(2, 2)})
    says = r"prefix 'blok\.0' matches no parameter or buffer of the model; did you mean 'block\.0' or "
    with pytest.raises(ValueError, match=says):
        Partition.of(model, [["blok.0"], ["block.2", "head"]])


def test_the_longest_prefix_wins() -> None:
    model = nn.ModuleDict({"a": mlp(2, 2, 2), "b": nn.Linear(2, 2)})
    assert owners(Partition.of(model, [["a", "b"], ["a.2"], ["a.2.bias"]])) == {
        **{"a.0.weight": 0, "a.0.bias": 0, "b.weight": 0, "b.bias": 0},
        **{"a.2.weight": 1, "a.2.bias": 2},
    }


def test_a_prefix_is_a_module_and_not_a_prefix_of_letters() -> None:
    model = nn.ModuleDict({"fc": nn.Linear(2, 2), "fc2": nn.Linear(2, 2)})
    assert owners(Partition.of(model, [["fc"], ["fc2"]])) == {
        **{"fc.weight": 0, "fc.bias": 0},
        **{"fc2.weight": 1, "fc2.bias": 1},
    }


# Contiguous


@every_model
def test_contiguous_parts_are_total_disjoint_ordered_and_not_empty(name: str) -> None:
    model = MODELS[name][0]()
    num_layers = len(layer_weights(model))
    for kappa in range(1, num_layers + 1):
        S = Partition.contiguous(model, kappa)
        listed = [tensor for part in S for tensor in part.tensors]
        assert sorted(listed) == sorted(tensor_names(model))
        parts = layer_owners(model, S)
        assert parts == sorted(parts)
        assert set(parts) == set(range(kappa))


@every_model
def test_a_block_is_never_split_while_there_are_enough_blocks(name: str) -> None:
    make, num_units, kinds = MODELS[name]
    model = make()
    for kappa in range(1, num_units + 1):
        owner = owners(Partition.contiguous(model, kappa))
        for block in blocks_of(model, kinds):
            assert len({owner[tensor] for tensor in owner if tensor.startswith(block + ".")}) == 1, (kappa, block)


@every_model
def test_more_parts_than_blocks_split_blocks_down_to_single_layers(name: str) -> None:
    make, num_units, _ = MODELS[name]
    model = make()
    num_layers = len(layer_weights(model))
    for kappa in range(num_units + 1, num_layers + 1):
        assert set(layer_owners(model, Partition.contiguous(model, kappa))) == set(range(kappa))
    assert layer_owners(model, Partition.per_layer(model)) == list(range(num_layers))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.data())
def test_the_dearest_part_is_as_cheap_as_can_be(costs: list[int], data: st.DataObject) -> None:
    kappa = data.draw(st.integers(1, len(costs)))
    owner = cut_by_cost(costs, kappa)
    assert owner == sorted(owner)
    assert set(owner) == set(range(kappa))
    load = [sum(cost for cost, i in zip(costs, owner, strict=True) if i == part) for part in range(kappa)]
    assert max(load) == smallest_maximum(costs, kappa)


def test_parts_are_balanced_by_the_number_of_weights() -> None:
    model = mlp(10, 10, 10, 10, 20, 10)  # 100, 100, 100, 200, 200
    S = Partition.contiguous(model, 3)
    assert layer_owners(model, S) == [0, 0, 0, 1, 2]
    assert S.sizes == (300, 200, 200)


def test_a_norm_and_a_bias_go_with_the_layer_before_them() -> None:
    layers = [(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.ReLU()) for _ in range(3)]
    owner = owners(Partition.contiguous(nn.Sequential(*itertools.chain(*layers)), 3))
    for i, first in enumerate((0, 3, 6)):
        assert owner[f"{first}.weight"] == owner[f"{first}.bias"] == i
        for tensor in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            assert owner[f"{first + 1}.{tensor}"] == i


def test_a_norm_registered_before_its_layer_goes_with_it_if_they_share_a_module() -> None:
    owner = owners(Partition.contiguous(nn.Sequential(*(PreNorm(4) for _ in range(3))), 3))
    assert [owner[f"{i}.norm.weight"] for i in range(3)] == [0, 1, 2]
    listed = nn.Sequential(*(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)) for _ in range(3)))
    owner = owners(Partition.contiguous(listed, 3))
    assert [owner[f"{i}.0.running_mean"] for i in range(3)] == [0, 1, 2]


def test_embeddings_and_bare_parameters_at_the_start_go_to_the_first_part_and_a_last_norm_to_the_last() -> None:
    owner = owners(Partition.contiguous(Gpt(), 4))
    assert owner["position"] == owner["embed.weight"] == 0
    assert owner["norm.weight"] == owner["norm.bias"] == 3
    assert "head.weight" not in owner, "it is the embedding, and has its name"


def test_the_buffers_of_a_wrapper_have_an_owner() -> None:
    assert owners(Partition.contiguous(Wrapper(mlp(4, 4, 4)), 2))["num_calls"] == 0


def test_a_tied_weight_has_one_owner() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    S = Partition.contiguous(model, 2)
    assert owners(S) == {"0.weight": 0, "0.bias": 0, "1.weight": 1, "1.bias": 1, "2.bias": 1}


@pytest.mark.parametrize(
    ("kappa", "allowed"),
    [*((kappa, "an integer >= 1") for kappa in (0, -1, 1.5, True)), (3, "<= the number of layers of the model, 2")],
)
@pytest.mark.parametrize("cut", [Partition.contiguous, Partition.balanced])
def test_kappa_is_a_count_of_at_most_the_number_of_layers(cut: Any, kappa: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"parts must be {allowed}, got {kappa}"):
        cut(mlp(2, 2, 2), kappa)


# What is included


class Bare(nn.Module):
    """Matrices of its own beside layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.matrix, self.vector = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4))
        self.held = nn.ParameterDict({"a": torch.zeros(16, 4), "b": torch.zeros(16, 4), "c": torch.zeros(16)})


def test_included_parameters_count_as_layers() -> None:
    model = nn.ParameterDict({"a": torch.zeros(16, 4), "b": torch.zeros(16, 4)})
    with pytest.raises(ValueError, match="the model has no layers to divide"):
        Partition.contiguous(model, 1)
    assert len(Partition.per_layer(model, include=["a", "b"])) == 1
    with pytest.raises(ValueError, match="parts must be <= the number of layers of the model, 3, got 4"):
        Partition.contiguous(Bare(), 4, include=["matrix", "held.*"])
    S = Partition.per_layer(Bare(), include=["matrix", "held.*"])
    assert [part.tensors for part in S] == [
        ("matrix", "vector"),
        ("first.weight", "first.bias"),
        ("held.a", "held.b", "held.c"),
    ]


def test_included_parameters_have_their_share_of_the_weights() -> None:
    S = Partition.contiguous(Bare(), 2, include=["matrix", "held.*"])  # 16 + 16, 128
    assert [part.tensors[0] for part in S] == ["matrix", "held.a"]


def test_names_may_be_iterators() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    assert len(Partition.per_layer(model, keep_dense=iter(["0"]))) == 2
    assert len(Partition.per_layer(Bare(), include=iter(["matrix"]))) == 2
    S = Partition.of(model, iter([iter(["0", "1"]), iter(["2"])]))
    assert [part.tensors for part in S] == [("0.weight", "0.bias", "1.weight", "1.bias"), ("2.weight", "2.bias")]


def test_a_buffer_in_no_part_is_an_error_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    with pytest.raises(ValueError, match=r"'1\.running_mean' belongs to no part"):
        Partition.of(model, [["0"]])


def test_a_shared_module_has_one_owner() -> None:
    shared = nn.Linear(4, 4)
    S = Partition.contiguous(nn.Sequential(shared, nn.Linear(4, 4), shared), 2)
    assert owners(S) == {"0.weight": 0, "0.bias": 0, "1.weight": 1, "1.bias": 1}
