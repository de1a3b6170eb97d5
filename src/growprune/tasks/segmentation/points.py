"""Geometry of batches of point clouds: farthest points, balls, interpolation. Only `rows` has a gradient.

Distances are sums of squared differences, not matrix products: they are exact near zero, stay float32 under autocast,
and do not count as FLOPs of the model. The backward pass of `rows`, that of F.embedding, is deterministic on CUDA too.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

log = logging.getLogger(__name__)


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
    if (kernel := _triton_kernel(xyz.device.type)) is not None:
        return kernel(xyz, num_samples)
    return farthest_points_by_loop(xyz, num_samples)


def farthest_points_by_loop(xyz: Tensor, num_samples: int) -> Tensor:
    """Do the same as `farthest_points` in torch operations: eight small ones per point."""
    axes = xyz.permute(2, 0, 1).contiguous()  # (3, B, N)
    nearest = torch.full_like(axes[0], torch.inf)
    chosen = torch.zeros(len(xyz), num_samples, dtype=torch.long, device=xyz.device)
    for step in range(num_samples - 1):
        last = chosen[:, step].view(1, -1, 1).expand(3, -1, 1)
        x, y, z = (axes - axes.gather(2, last)).square_()
        nearest = torch.minimum(nearest, x + y + z)
        torch.argmax(nearest, dim=1, out=chosen[:, step + 1])
    return chosen  # (B, num_samples)


@functools.cache
def _triton_kernel(device_type: str) -> Callable[[Tensor, int], Tensor] | None:
    """Return the Triton kernel if it can run. Cached, so that the warning comes once."""
    if device_type != "cuda":
        return None
    try:
        from growprune.tasks.segmentation.farthest import farthest_points
    except ImportError:
        log.warning("Triton is not installed: a slow loop on CUDA finds the farthest points. Run pip install triton")
        return None
    return farthest_points


def ball_query(distances: Tensor, radius: float, num_neighbours: int) -> Tensor:
    """Return the first points, by index, within a radius of each centre. If there are too few, the first one repeats.

    Args:
        distances: squared, (B, S, N), from centres that are among the points, so that no ball is empty.

    >>> ball_query(torch.tensor([[[4.0, 0.0, 0.01, 0.02]]]), 1.0, 4)
    tensor([[[1, 2, 3, 1]]])
    """
    num_clouds, num_centres, num_points = distances.shape
    # the count of points inside rises along the index: the k-th neighbour is where it reaches k
    inside = (distances <= radius**2).cumsum(-1, dtype=torch.int32)
    wanted = torch.arange(1, num_neighbours + 1, dtype=torch.int32, device=distances.device)
    index = torch.searchsorted(inside, wanted.expand(num_clouds, num_centres, -1).contiguous())
    return torch.where(index < num_points, index, index[..., :1])  # (B, S, num_neighbours)


def three_nearest(xyz: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return the three nearest known points of each point, and weights in proportion to 1 / squared distance.

    >>> index, weights = three_nearest(torch.tensor([[[0.0, 0, 0]]]), torch.tensor([[[1.0, 0, 0], [0, 2.0, 0]]]))
    >>> index.tolist(), [round(w, 3) for w in weights.flatten().tolist()]
    ([[[0, 1]]], [0.8, 0.2])
    """
    distances, index = squared_distances(xyz, known).topk(min(3, known.shape[1]), largest=False)
    closeness = 1 / (distances + 1e-8)
    return index, closeness / closeness.sum(-1, keepdim=True)  # (B, N, 3) both


def interpolate(xyz: Tensor, known: Tensor, features: Tensor) -> Tensor:
    """Interpolate features at points from the features of known points."""
    if known.shape[1] == 1:
        return features.expand(-1, xyz.shape[1], -1)
    with torch.no_grad():
        index, weights = three_nearest(xyz, known)
    weighted = rows(features, index) * weights.to(features.dtype).unsqueeze(-1)
    return weighted.sum(2).to(features.dtype)  # (B, N, C); under autocast, sums are float32
