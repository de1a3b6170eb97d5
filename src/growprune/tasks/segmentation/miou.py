"""How well parts are told apart: intersection over union, as the ShapeNet part benchmark defines it."""

from __future__ import annotations

import torch
from torch import Tensor

from growprune.tasks.segmentation.categories import NUM_CATEGORIES, NUM_PARTS, parts_of


def predict(logits: Tensor, categories: Tensor) -> Tensor:
    """The likeliest part of each point among those of the shape's category."""
    allowed = parts_of(categories).unsqueeze(1)
    return logits.masked_fill(~allowed, -torch.inf).argmax(2)  # (B, N)


def shape_ious(predicted: Tensor, labels: Tensor, categories: Tensor) -> Tensor:
    """Of each shape, the mean over its category's parts; a part that is neither there nor predicted counts 1."""
    parts = torch.arange(NUM_PARTS, device=labels.device)
    is_predicted, is_true = predicted.unsqueeze(2) == parts, labels.unsqueeze(2) == parts  # (B, N, parts)
    intersection, union = (is_predicted & is_true).sum(1), (is_predicted | is_true).sum(1)
    ious = torch.where(union == 0, 1.0, intersection / union.clamp(min=1))
    own = parts_of(categories)
    return (ious * own).sum(1) / own.sum(1)  # (B,)


def mean_ious(ious: Tensor, categories: Tensor) -> tuple[float, float]:
    """Over shapes, and over the categories there are of the mean over their shapes."""
    membership = (categories.unsqueeze(1) == torch.arange(NUM_CATEGORIES, device=ious.device)).to(torch.float64)
    ious, counts = ious.to(torch.float64), membership.sum(0)
    by_category = (ious.unsqueeze(1) * membership).sum(0) / counts.clamp(min=1)
    return float(ious.mean()), float(by_category.sum() / (counts > 0).sum())
