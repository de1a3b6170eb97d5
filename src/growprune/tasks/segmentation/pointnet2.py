"""PointNet++ for part segmentation with multi-scale grouping (Qi et al., NeurIPS 2017), as wide as its PyTorch port.

Features are rows, (B, points, channels). A gathered group is an image in channels-last order, groups x neighbours, so
that the shared layers, which are 1x1 convolutions, need no copy of it. Unlike in the port, convolutions before a norm
have no bias, because the norm would remove it.

Distances are sums of squared differences, not matrix products: they are exact near zero, stay float32 under autocast,
and do not count as FLOPs of the model. Of the geometric functions, only `rows` has a gradient: the backward pass of
F.embedding, which is deterministic on CUDA, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.tasks.segmentation.shapenet import NUM_CATEGORIES, NUM_PARTS

if TYPE_CHECKING:
    from growprune.tasks.segmentation import PartSegmentation


class Scale(NamedTuple):
    """A neighbourhood size of a set abstraction."""

    radius: float
    num_neighbours: int
    widths: tuple[int, ...]


SA1 = (Scale(0.1, 32, (32, 32, 64)), Scale(0.2, 64, (64, 64, 128)), Scale(0.4, 128, (64, 96, 128)))
SA2 = (Scale(0.4, 64, (128, 128, 256)), Scale(0.8, 128, (128, 196, 256)))
NUM_CENTRES = (512, 128)


class PointNet2(nn.Module):
    """Predict logits of parts, (B, N, NUM_PARTS), from points (B, N, 6), xyz and normals, and categories (B,)."""

    def __init__(self, task: PartSegmentation) -> None:
        super().__init__()

        def wide(*channels: int) -> tuple[int, ...]:
            return tuple(scaled(channel, task.width) for channel in channels)

        def scales(full: Sequence[Scale]) -> list[Scale]:
            return [Scale(s.radius, scaled(s.num_neighbours, task.detail), wide(*s.widths)) for s in full]

        self.sa1 = SetAbstraction(6, scaled(NUM_CENTRES[0], task.detail), scales(SA1))
        self.sa2 = SetAbstraction(self.sa1.outputs, scaled(NUM_CENTRES[1], task.detail), scales(SA2))
        self.sa3 = GlobalAbstraction(self.sa2.outputs, wide(256, 512, 1024))
        self.fp3 = FeaturePropagation(self.sa2.outputs + self.sa3.outputs, wide(256, 256))
        self.fp2 = FeaturePropagation(self.sa1.outputs + self.fp3.outputs, wide(256, 128))
        self.fp1 = FeaturePropagation(NUM_CATEGORIES + 3 + 6 + self.fp2.outputs, wide(128, 128))
        (hidden,) = wide(128)
        self.conv1 = nn.Conv1d(self.fp1.outputs, hidden, 1, bias=False)
        self.bn1 = nn.BatchNorm1d(hidden)
        self.drop1 = nn.Dropout(task.dropout)
        self.conv2 = nn.Conv1d(hidden, NUM_PARTS, 1)
        self.apply(initialise)

    def forward(self, points: Tensor, categories: Tensor) -> Tensor:
        xyz = points[..., :3].contiguous()
        xyz1, features1 = self.sa1(xyz, points)
        xyz2, features2 = self.sa2(xyz1, features1)
        xyz3, features3 = self.sa3(xyz2, features2)
        features2 = self.fp3(xyz2, xyz3, features2, features3)
        features1 = self.fp2(xyz1, xyz2, features1, features2)
        known = torch.arange(NUM_CATEGORIES, device=categories.device)
        one_hot = (categories[:, None, None] == known).to(points.dtype).expand(-1, points.shape[1], -1)
        skip = torch.cat([one_hot, xyz, points], 2)
        features = self.fp1(xyz, xyz1, skip.to(features1.dtype), features1)
        hidden = torch.relu(self.bn1(self.conv1(features.transpose(1, 2))))
        return self.conv2(self.drop1(hidden)).transpose(1, 2)  # type: ignore[no-any-return]  # (B, N, NUM_PARTS)


class SetAbstraction(nn.Module):
    """Choose centres, and compute features of their neighbourhoods at several scales."""

    def __init__(self, inputs: int, num_centres: int, scales: Sequence[Scale]) -> None:
        super().__init__()
        self.num_centres = num_centres
        self.scales = tuple((scale.radius, scale.num_neighbours) for scale in scales)
        self.branches = nn.ModuleList(shared_layers(inputs + 3, scale.widths, dims=2) for scale in scales)
        self.outputs = sum(scale.widths[-1] for scale in scales)

    def forward(self, xyz: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            centres = rows(xyz, farthest_points(xyz, self.num_centres))  # (B, S, 3)
            distances = squared_distances(centres, xyz)  # (B, S, N)
            groups = [ball_query(distances, radius, num_neighbours) for radius, num_neighbours in self.scales]
        pooled = []
        for group, branch in zip(groups, self.branches, strict=True):
            offsets = rows(xyz, group) - centres.unsqueeze(2)
            image = torch.cat([rows(features, group), offsets.to(features.dtype)], 3)  # (B, S, K, C + 3)
            pooled.append(branch(image.permute(0, 3, 1, 2)).max(3).values)
        return centres, torch.cat(pooled, 1).transpose(1, 2)  # (B, S, C')


class GlobalAbstraction(nn.Module):
    """Compute one feature vector for the whole cloud, at the origin."""

    def __init__(self, inputs: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = shared_layers(3 + inputs, widths, dims=1)
        self.outputs = widths[-1]

    def forward(self, xyz: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([xyz.to(features.dtype), features], 2)
        pooled = self.layers(both.transpose(1, 2)).max(2).values  # (B, C')
        return torch.zeros_like(xyz[:, :1]), pooled.unsqueeze(1)


class FeaturePropagation(nn.Module):
    """Interpolate features of coarse points at fine points, and combine them with the features of the fine points."""

    def __init__(self, inputs: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = shared_layers(inputs, widths, dims=1)
        self.outputs = widths[-1]

    def forward(self, xyz: Tensor, coarse: Tensor, skip: Tensor, features: Tensor) -> Tensor:
        both = torch.cat([skip, interpolate(xyz, coarse, features)], 2)
        return self.layers(both.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]  # (B, N, C')


def shared_layers(inputs: int, widths: Sequence[int], *, dims: int) -> nn.Sequential:
    """Return layers that apply the same weights to every point: 1x1 convolutions over one or two axes of points."""
    convolution, norm = (nn.Conv1d, nn.BatchNorm1d) if dims == 1 else (nn.Conv2d, nn.BatchNorm2d)
    layers: list[nn.Module] = []
    for width in widths:
        layers += [convolution(inputs, width, 1, bias=False), norm(width), nn.ReLU(inplace=True)]
        inputs = width
    return nn.Sequential(*layers)


def scaled(number: int, by: float) -> int:
    return max(1, round(number * by))


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        nn.init.xavier_normal_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def rows(table: Tensor, index: Tensor) -> Tensor:
    """Gather rows of each cloud, by an index of any shape.

    >>> rows(torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]]), torch.tensor([[1], [0]])).flatten().tolist()
    [2.0, 3.0]
    """
    num_clouds, num_rows, width = table.shape
    first = torch.arange(num_clouds, device=table.device) * num_rows
    flat = index + first.view(-1, *[1] * (index.dim() - 1))
    return F.embedding(flat, table.reshape(num_clouds * num_rows, width))  # (B, ..., C)


def squared_distances(xyz: Tensor, others: Tensor) -> Tensor:
    """Return squared distances from every point of a cloud (B, S, 3) to every point of another (B, N, 3)."""
    squares = [(xyz[:, :, None, axis] - others[:, None, :, axis]).square_() for axis in range(3)]
    return squares[0].add_(squares[1]).add_(squares[2])  # (B, S, N)


def farthest_points(xyz: Tensor, num_samples: int) -> Tensor:
    """Choose point 0, and then repeatedly the point that is farthest from all chosen points; the first, if several are.

    Other implementations start at a random point. Here the points are in random order, so the first is random too.

    >>> farthest_points(torch.tensor([[[0.0, 0, 0], [1, 0, 0], [5, 0, 0], [3, 0, 0]]]), 3)
    tensor([[0, 2, 3]])
    """
    if xyz.is_meta:  # skip hundreds of steps
        return xyz.new_empty(len(xyz), num_samples, dtype=torch.long)
    axes = xyz.permute(2, 0, 1).contiguous()  # (3, B, N)
    nearest = torch.full_like(axes[0], torch.inf)
    chosen = torch.zeros(len(xyz), num_samples, dtype=torch.long, device=xyz.device)
    for step in range(num_samples - 1):
        last = chosen[:, step].view(1, -1, 1).expand(3, -1, 1)
        x, y, z = (axes - axes.gather(2, last)).square_()
        nearest = torch.minimum(nearest, x + y + z)
        torch.argmax(nearest, dim=1, out=chosen[:, step + 1])
    return chosen  # (B, num_samples)


def ball_query(distances: Tensor, radius: float, num_neighbours: int) -> Tensor:
    """Return the first points, by index, within a radius of each centre. If there are too few, the first one repeats.

    Args:
        distances: squared, (B, S, N), from centres that are among the points, so that no ball is empty.

    >>> ball_query(torch.tensor([[[4.0, 0.0, 0.01, 0.02]]]), 1.0, 4)
    tensor([[[1, 2, 3, 1]]])
    """
    num_clouds, num_centres, num_points = distances.shape
    # the number of points inside rises along the index, and the k-th neighbour is where it reaches k
    inside = (distances <= radius**2).cumsum(-1, dtype=torch.int32)
    wanted = torch.arange(1, num_neighbours + 1, dtype=torch.int32, device=distances.device)
    index = torch.searchsorted(inside, wanted.expand(num_clouds, num_centres, -1).contiguous())
    return torch.where(index < num_points, index, index[..., :1])  # (B, S, num_neighbours)


def interpolate(xyz: Tensor, known: Tensor, features: Tensor) -> Tensor:
    """Interpolate features at points from the three nearest known points, weighted by 1 / squared distance.

    >>> interpolate(torch.zeros(1, 1, 3), torch.tensor([[[1.0, 0, 0], [0, 2.0, 0]]]), torch.tensor([[[10.0], [20.0]]]))
    tensor([[[12.]]])
    """
    if known.shape[1] == 1:
        return features.expand(-1, xyz.shape[1], -1)
    with torch.no_grad():
        distances, index = squared_distances(xyz, known).topk(min(3, known.shape[1]), largest=False)
        closeness = 1 / (distances + 1e-8)
        weights = closeness / closeness.sum(-1, keepdim=True)  # (B, N, 3), like the index
    weighted = rows(features, index) * weights.to(features.dtype).unsqueeze(-1)
    return weighted.sum(2).to(features.dtype)  # (B, N, C); under autocast, sums are float32
