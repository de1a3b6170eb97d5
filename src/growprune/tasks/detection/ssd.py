"""SSD300 v1.1: Liu et al., 2016, with a ResNet as its backbone, as NVIDIA's DeepLearningExamples describe it."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from growprune.tasks.classification.resnet import KINDS, Name, ResNet
from growprune.tasks.detection.boxes import BOXES_PER_CELL


class Backbone(ResNet):
    """A ResNet up to its third stage, which has stride 1 here: an image of 300 x 300 becomes a map of 38 x 38."""

    def __init__(self, name: Name, *, width: int) -> None:
        super().__init__(name, width=width, num_classes=1)
        del self.layer4, self.fc
        for module in self.layer3.modules():
            if isinstance(module, nn.Conv2d):
                module.stride = (1, 1)
        self.num_outputs = KINDS[name][0].expansion * 4 * width

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.layer3(self.layer2(self.layer1(x)))  # type: ignore[no-any-return]


class Convolution(nn.Conv2d):
    """A convolution initialised as in the reference code, outside the backbone."""

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class SSD(nn.Module):
    """A backbone, five blocks that each shrink the map, and two convolutions on each map: boxes and classes.

    Args:
        width: channels of the backbone's stem; all other channels scale with it.
        num_classes: without the background.
    """

    def __init__(self, name: Name, *, width: int, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.backbone = Backbone(name, width=width)
        channels = [self.backbone.num_outputs, 8 * width, 8 * width, 4 * width, 4 * width, 4 * width]
        middles = [4 * width, 4 * width, 2 * width, 2 * width, 2 * width]
        self.additional_blocks = nn.ModuleList(
            _block(inputs, middle, outputs, shrinks=index < 3)
            for index, ((inputs, outputs), middle) in enumerate(zip(pairwise(channels), middles, strict=True))
        )
        self.loc = _heads(channels, 4)
        self.conf = _heads(channels, 1 + num_classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return offsets from the anchors (B, 8732, 4) and logits (B, 8732, 1 + classes) of images (B, 3, 300, 300)."""
        maps = [self.backbone(images)]
        for block in self.additional_blocks:
            maps.append(block(maps[-1]))
        return _read(self.loc, maps, 4), _read(self.conf, maps, 1 + self.num_classes)


def _block(inputs: int, middle: int, outputs: int, *, shrinks: bool) -> nn.Sequential:
    """A 1 x 1 and a 3 x 3 convolution, which halves the map or removes its border."""
    stride, padding = (2, 1) if shrinks else (1, 0)
    return nn.Sequential(
        Convolution(inputs, middle, 1, bias=False),
        nn.BatchNorm2d(middle),
        nn.ReLU(),
        Convolution(middle, outputs, 3, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


def _heads(channels: list[int], num_values: int) -> nn.ModuleList:
    sizes = zip(channels, BOXES_PER_CELL, strict=True)
    return nn.ModuleList(Convolution(inputs, boxes * num_values, 3, padding=1) for inputs, boxes in sizes)


def _read(heads: nn.ModuleList, maps: list[Tensor], num_values: int) -> Tensor:
    """Apply the heads. Returns values of all anchors, (B, A, num_values), in the order of `default_boxes`."""
    values = [head(x).unflatten(1, (num_values, -1)).flatten(2) for head, x in zip(heads, maps, strict=True)]
    return torch.cat(values, 2).transpose(1, 2)
