"""Shapes on the device, where they stay, and points drawn from them: anew to train, always the same to evaluate."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from growprune.tasks.segmentation import shapenet

Batch = tuple[Tensor, Tensor, Tensor]
"""Points (B, N, 3 or 6), categories (B,), and the part of each point (B, N)."""


@dataclass(frozen=True)
class DeviceShapes:
    """The shapes of a split; see shapenet.Shapes."""

    points: Tensor
    labels: Tensor
    starts: Tensor
    """Where the points of each shape begin."""
    counts: Tensor
    categories: Tensor
    longest: int
    """The largest of the counts, known without asking the device."""


@functools.cache
def shapes_on(data: str, split: str, device: torch.device) -> DeviceShapes:
    shapes = shapenet.shapes_of(data, split)
    starts = shapes.counts.cumsum() - shapes.counts
    arrays = (shapes.points, shapes.labels, starts, shapes.counts, shapes.categories)
    points, labels, first, counts, categories = (torch.from_numpy(array).to(device) for array in arrays)
    return DeviceShapes(points, labels, first, counts, categories, int(shapes.counts.max()))


@functools.cache
def evaluation_set(data: str, split: str, num_points: int, device: torch.device) -> Batch:
    """All of a split, its points drawn once, and on the CPU, so that every device sees the same."""
    shapes = shapes_on(data, split, torch.device("cpu"))
    everything = torch.arange(len(shapes.counts))
    points, categories, labels = draw(shapes, everything, num_points, torch.Generator().manual_seed(0))
    return points.to(device), categories.to(device), labels.to(device)


def draw(shapes: DeviceShapes, indices: Tensor, num_points: int, generator: torch.Generator) -> Batch:
    """Points of some shapes, each shape's in random order; when all are taken, from the first again."""
    device = indices.device
    counts = shapes.counts[indices].unsqueeze(1)
    keys = torch.rand(len(indices), shapes.longest, generator=generator, device=device)
    keys.masked_fill_(torch.arange(shapes.longest, device=device) >= counts, 2)  # what a shape has not comes last
    order = keys.argsort(dim=1, stable=True)
    drawn = order.gather(1, torch.arange(num_points, device=device) % counts)
    rows = shapes.starts[indices].unsqueeze(1) + drawn
    return shapes.points[rows], shapes.categories[indices], shapes.labels[rows].long()


def mixed(seed: int, number: int) -> int:
    """One seed out of two."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> np.uint64(1))
