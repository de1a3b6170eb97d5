"""Residual networks (He et al., 2015): ResNet-18 and ResNet-50 v1.5, for large images and for small ones."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

Name = Literal["resnet18", "resnet50"]
Stem = Literal["imagenet", "cifar"]


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _convolution(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _convolution(width, width, 3), nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.downsample(x))  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions and a shortcut. As in v1.5, the 3 x 3 convolution has the stride."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.conv1, self.bn1 = _convolution(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _convolution(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.downsample(x))  # type: ignore[no-any-return]


KINDS: dict[str, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
}
"""The block of each model, and the number of blocks per stage."""


class ResNet(nn.Module):
    """A stem, four stages that each double the width, average pooling, and a linear layer.

    Args:
        stem: "imagenet" halves the image twice before the first stage, "cifar" keeps its size.
        width: channels of the stem.

    >>> sum(p.numel() for p in ResNet("resnet18", stem="cifar", num_classes=10).parameters())
    11173962
    """

    def __init__(self, name: Name, *, stem: Stem = "imagenet", width: int = 64, num_classes: int = 1000) -> None:
        super().__init__()
        block, depths = KINDS[name]
        is_small = stem == "cifar"
        self.conv1 = _convolution(3, width, 3) if is_small else _convolution(3, width, 7, stride=2)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU()
        self.maxpool = nn.Identity() if is_small else nn.MaxPool2d(3, stride=2, padding=1)
        inputs, stages = width, []
        for stage, depth in enumerate(depths):
            blocks = []
            for number in range(depth):
                blocks.append(block(inputs, width << stage, stride=2 if stage and not number else 1))
                inputs = block.expansion * (width << stage)
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(inputs, num_classes)
        self.apply(initialise)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))  # (B, C, H, W)
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


def initialise(module: nn.Module) -> None:
    """Initialise one module: convolutions by He's rule over their inputs, all others as torch does.

    The last norm of a block is also initialised with ones, because the paper's recipe does not use zeros.
    """
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
    elif isinstance(module, nn.BatchNorm2d | nn.Linear):
        module.reset_parameters()


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
