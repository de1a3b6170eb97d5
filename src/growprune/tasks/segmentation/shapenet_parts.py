"""The 16 categories and 50 parts of the ShapeNet part benchmark, and its metric, the mean IoU."""

from __future__ import annotations

import torch
from torch import Tensor

SYNSETS = {
    "02691156": ("Airplane", 4),
    "02773838": ("Bag", 2),
    "02954340": ("Cap", 2),
    "02958343": ("Car", 4),
    "03001627": ("Chair", 4),
    "03261776": ("Earphone", 3),
    "03467517": ("Guitar", 3),
    "03624134": ("Knife", 2),
    "03636649": ("Lamp", 4),
    "03642806": ("Laptop", 2),
    "03790512": ("Motorbike", 6),
    "03797390": ("Mug", 2),
    "03948459": ("Pistol", 3),
    "04099429": ("Rocket", 3),
    "04225987": ("Skateboard", 3),
    "04379243": ("Table", 3),
}
"""Name and number of parts of each category, by folder. Parts are numbered consecutively in this order."""

NUM_CATEGORIES = len(SYNSETS)
NUM_PARTS = sum(count for _, count in SYNSETS.values())


def parts_by_category() -> list[range]:
    """Return the numbers of the parts of each category.

    >>> parts_by_category()[:3]
    [range(0, 4), range(4, 6), range(6, 8)]
    """
    ranges, first = [], 0
    for _, count in SYNSETS.values():
        ranges.append(range(first, first + count))
        first += count
    return ranges


def parts_of(categories: Tensor) -> Tensor:
    """Return a mask of the parts that belong to the category of each shape."""
    owners = [category for category, parts in enumerate(parts_by_category()) for _ in parts]
    return torch.tensor(owners, device=categories.device) == categories[:, None]  # (B, parts)


def predict(logits: Tensor, categories: Tensor) -> Tensor:
    """Return the most likely part of each point, among the parts of the shape's category."""
    allowed = parts_of(categories).unsqueeze(1)
    return logits.masked_fill(~allowed, -torch.inf).argmax(2)  # (B, N)


def shape_ious(predicted: Tensor, labels: Tensor, categories: Tensor) -> Tensor:
    """Return the mean IoU of each shape over the parts of its category. A part that is nowhere counts as 1."""
    parts = torch.arange(NUM_PARTS, device=labels.device)
    is_predicted, is_true = predicted.unsqueeze(2) == parts, labels.unsqueeze(2) == parts  # (B, N, parts)
    intersection, union = (is_predicted & is_true).sum(1), (is_predicted | is_true).sum(1)
    ious = torch.where(union == 0, 1.0, intersection / union.clamp(min=1))
    own = parts_of(categories)
    return (ious * own).sum(1) / own.sum(1)  # (B,)


def mean_ious(ious: Tensor, categories: Tensor) -> tuple[float, float]:
    """Return the mean IoU over shapes, and the mean over categories of their mean over shapes."""
    membership = (categories.unsqueeze(1) == torch.arange(NUM_CATEGORIES, device=ious.device)).to(torch.float64)
    ious, counts = ious.to(torch.float64), membership.sum(0)
    by_category = (ious.unsqueeze(1) * membership).sum(0) / counts.clamp(min=1)
    return float(ious.mean()), float(by_category.sum() / (counts > 0).sum())
