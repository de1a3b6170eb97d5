"""The 8,732 default boxes of SSD300 on COCO, and which object each of them has to find."""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import Tensor

from growprune.tasks.detection.boxes import corners, iou

IMAGE_SIZE = 300
FEATURE_SIZES = (38, 19, 10, 5, 3, 1)
STEPS = (8, 16, 32, 64, 100, 300)
"""Pixels of the image from one cell of a feature map to the next."""
SCALES = (21, 45, 99, 153, 207, 261, 315)
"""Pixels along the square box of each feature map, and of one map more."""
ASPECTS = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))
BOXES_PER_CELL = tuple(2 + 2 * len(aspects) for aspects in ASPECTS)
MATCH_IOU = 0.5


@functools.cache
def default_boxes(device: torch.device) -> Tensor:
    """All default boxes as (centre x, centre y, width, height) in shares of the image, (8732, 4).

    Their order is that of the model's outputs: feature map, box of the cell, row, column.
    """
    rows = [
        (column * step, row * step, width, height)
        for level, (size, pixels) in enumerate(zip(FEATURE_SIZES, STEPS, strict=True))
        for step in (pixels / IMAGE_SIZE,)
        for width, height in _sizes(level)
        for row, column in itertools.product((cell + 0.5 for cell in range(size)), repeat=2)
    ]
    return torch.tensor(rows, device="cpu").clamp(0, 1).to(device)


def _sizes(level: int) -> list[tuple[float, float]]:
    """Widths and heights of the boxes of a cell: two squares, then the other shapes, lying and standing."""
    small, large = (scale / IMAGE_SIZE for scale in SCALES[level : level + 2])
    middle = math.sqrt(small * large)
    sizes = [(small, small), (middle, middle)]
    for aspect in ASPECTS[level]:
        long, short = small * math.sqrt(aspect), small / math.sqrt(aspect)
        sizes += [(long, short), (short, long)]
    return sizes


def match(boxes: Tensor, labels: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """Which object each anchor has to find: the box of its target and its label, 0 for background.

    An anchor goes to the object it overlaps most, if their IoU is above 0.5. The best anchor of an object goes to it
    whatever their IoU; of several objects with the same best anchor, the one that overlaps it most has it.

    Args:
        boxes: corners, in shares of the image, (B, M, 4).
        labels: (B, M), 0 where there is no object.
        anchors: what `default_boxes` gives, (A, 4).
    """
    absent = (labels == 0).unsqueeze(1)
    overlap = iou(corners(anchors).unsqueeze(0), boxes).masked_fill(absent, -1)  # (B, A, M)
    best_anchor = overlap.argmax(1, keepdim=True)  # (B, 1, M)
    claimed = torch.arange(len(anchors), device=boxes.device).view(1, -1, 1) == best_anchor
    overlap = torch.where(claimed & ~absent, overlap + 2, overlap)  # above any that is not claimed
    best, index = overlap.max(2)  # (B, A)
    matched = labels.gather(1, index).where(best > MATCH_IOU, 0)
    return boxes.gather(1, index.unsqueeze(2).expand(-1, -1, 4)), matched
