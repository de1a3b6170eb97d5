"""Networks for inference_networks.py that no kernel was tuned for: a U-Net, and one with depthwise convolutions."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

INVERTED = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""MobileNetV2's expansion, channels, blocks, and the stride of the first block."""


def conv(channels: int, out: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution and its BatchNorm."""
    layer = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    if groups == 1:
        nn.init.normal_(layer.weight, std=(20 / (channels * kernel**2)) ** 0.5)  # activations stay as large at 90 %
    return [layer, nn.BatchNorm2d(out)]


class InvertedResidual(nn.Module):
    """Expand, filter each channel, project."""

    def __init__(self, channels: int, out: int, expansion: int, stride: int) -> None:
        super().__init__()
        wide = channels * expansion
        layers = [*conv(channels, wide, 1), nn.ReLU6()] if expansion > 1 else []
        layers += [*conv(wide, wide, 3, stride, groups=wide), nn.ReLU6(), *conv(wide, out, 1)]
        self.layers, self.has_shortcut = nn.Sequential(*layers), stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.has_shortcut else self.layers(x)


class MobileNet(nn.Module):
    """MobileNetV2's blocks."""

    def __init__(self, width: float = 1.0, num_classes: int = 100) -> None:
        super().__init__()
        channels = int(32 * width)
        layers: list[nn.Module] = [*conv(3, channels, stride=2), nn.ReLU6()]
        for expansion, full, blocks, first_stride in INVERTED:
            for i in range(blocks):
                out = int(full * width)
                layers.append(InvertedResidual(channels, out, expansion, first_stride if i == 0 else 1))
                channels = out
        self.layers = nn.Sequential(*layers, *conv(channels, int(1280 * width), 1), nn.ReLU6())
        self.head = nn.Linear(int(1280 * width), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))  # type: ignore[no-any-return]

    def dense_layers(self) -> list[str]:
        """The stem, and the depthwise convolutions, which have few weights."""
        grouped = [name for name, m in self.named_modules() if isinstance(m, nn.Conv2d) and m.groups > 1]
        return ["layers.0", *grouped]


def double_conv(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(*conv(channels, out), nn.ReLU(), *conv(out, out), nn.ReLU())


class UNet(nn.Module):
    """Four levels."""

    def __init__(self, width: int = 32, num_classes: int = 2) -> None:
        super().__init__()
        widths = [width << i for i in range(4)]
        self.stem = double_conv(3, width)
        self.down = nn.ModuleList(double_conv(a, b) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(double_conv(a + b, a) for a, b in itertools.pairwise(widths))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.stem(x)]
        for down in self.down:
            found.append(down(nn.functional.max_pool2d(found[-1], 2)))
        x = found.pop()
        for up in reversed(self.up):
            wide = nn.functional.interpolate(x, scale_factor=2.0, mode="nearest")
            x = up(torch.cat([found.pop(), wide], 1))
        return self.head(x)  # type: ignore[no-any-return]
