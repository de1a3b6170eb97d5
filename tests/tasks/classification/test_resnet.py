"""ResNet-18 and ResNet-50: sizes, shapes and how they begin."""

import math
from typing import Any

import pytest
import torch
from classification_cases import num_parameters
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.tasks.classification import Classification
from growprune.tasks.classification.resnet import BasicBlock, Bottleneck, ResNet


@pytest.mark.parametrize(
    ("name", "stem", "num_classes", "expected"),
    [
        ("resnet50", "imagenet", 1000, 25_557_032),
        ("resnet18", "imagenet", 1000, 11_689_512),
        ("resnet18", "cifar", 10, 11_173_962),
        ("resnet50", "cifar", 10, 23_520_842),
    ],
)
def test_networks_have_the_published_number_of_parameters(
    name: Any, stem: Any, num_classes: int, expected: int
) -> None:
    with torch.device("meta"):
        assert num_parameters(ResNet(name, stem=stem, num_classes=num_classes)) == expected


def stage_shapes(task: Classification) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model, x = task.build_model().eval(), task.example()
    shapes = {}
    for name in ("conv1", "maxpool", "layer1", "layer2", "layer3", "layer4", "fc"):
        model.get_submodule(name).register_forward_hook(
            lambda module, args, out, name=name: shapes.__setitem__(name, tuple(out.shape[1:]))
        )
    model(x)
    return shapes


def test_the_stem_for_small_images_keeps_their_size() -> None:
    shapes = stage_shapes(Classification(model="resnet18", stem="cifar", width=8, num_classes=10, image_size=32))
    assert shapes["conv1"] == shapes["maxpool"] == shapes["layer1"] == (8, 32, 32)
    assert shapes["layer4"] == (64, 4, 4)
    assert shapes["fc"] == (10,)


def norm(x: Tensor, bn: nn.BatchNorm2d) -> Tensor:
    """Batch normalisation in evaluation, written out."""
    mean, var, weight, bias = (t[:, None, None] for t in (bn.running_mean, bn.running_var, bn.weight, bn.bias))  # type: ignore[index]
    return (x - mean) / (var + 1e-5).sqrt() * weight + bias


def randomised(module: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(0)
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():  # of both signs, but for variances
            drawn = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(drawn.abs() + 0.1 if name.endswith("running_var") else drawn)
    return module.eval().double()


@torch.no_grad()
def test_a_bottleneck_computes_what_its_formula_says() -> None:
    block = randomised(Bottleneck(6, 4, 2))
    x = torch.randn(2, 6, 8, 8, dtype=torch.float64)
    y = norm(torch.einsum("oi,bihw->bohw", block.conv1.weight[:, :, 0, 0], x), block.bn1).clamp(min=0)
    y = norm(F.conv2d(y, block.conv2.weight, stride=2, padding=1), block.bn2).clamp(min=0)
    y = norm(torch.einsum("oi,bihw->bohw", block.conv3.weight[:, :, 0, 0], y), block.bn3)
    down, down_bn = block.downsample
    shortcut = norm(torch.einsum("oi,bihw->bohw", down.weight[:, :, 0, 0], x[:, :, ::2, ::2]), down_bn)
    torch.testing.assert_close(block(x), (y + shortcut).clamp(min=0))


@torch.no_grad()
def test_a_basic_block_computes_what_its_formula_says() -> None:
    block = randomised(BasicBlock(4, 4, 1))
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    y = norm(F.conv2d(x, block.conv1.weight, padding=1), block.bn1).clamp(min=0)
    y = norm(F.conv2d(y, block.conv2.weight, padding=1), block.bn2)
    torch.testing.assert_close(block(x), (y + x).clamp(min=0))


@torch.no_grad()
def test_a_network_is_its_stages_one_after_another() -> None:
    model = randomised(ResNet("resnet18", stem="imagenet", width=2, num_classes=3))
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    y = F.conv2d(x, model.conv1.weight, stride=2, padding=3)
    y = F.max_pool2d(norm(y, model.bn1).clamp(min=0), 3, 2, 1)
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        for block in stage:
            y = block(y)
    torch.testing.assert_close(model(x), y.flatten(2).mean(2) @ model.fc.weight.T + model.fc.bias)


def test_convolutions_begin_by_hes_rule_and_no_norm_with_zeros() -> None:
    torch.manual_seed(0)
    model = ResNet("resnet50", width=32, num_classes=10)
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            deviation = math.sqrt(2 / (module.in_channels * math.prod(module.kernel_size)))
            assert float(module.weight.detach().std()) == pytest.approx(deviation, rel=0.1), name
        if isinstance(module, nn.BatchNorm2d):
            assert bool((module.weight == 1).all()), name
