"""Arithmetic of boxes: IoU, offsets from anchors, non-maximum suppression.

A box is its corners (x0, y0, x1, y1), and an anchor its centre and size, in shares of the image.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CENTRE_VARIANCE, SIZE_VARIANCE = 0.1, 0.2
NMS_IOU = 0.5
MIN_SCORE = 0.05
MAX_DETECTIONS = 200


def corners(boxes: Tensor) -> Tensor:
    """(centre, size) to (corner, corner)."""
    centre, size = boxes[..., :2], boxes[..., 2:]
    return torch.cat((centre - size / 2, centre + size / 2), -1)


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of each box of a, (..., N, 4), with each of b, (..., M, 4), as (..., N, M).

    >>> iou(torch.tensor([[0.0, 0.0, 2.0, 1.0]]), torch.tensor([[1.0, 0.0, 3.0, 1.0]]))
    tensor([[0.3333]])
    """
    ax0, ay0, ax1, ay1 = a.unsqueeze(-2).unbind(-1)  # each (..., N, 1)
    bx0, by0, bx1, by1 = b.unsqueeze(-3).unbind(-1)  # each (..., 1, M)
    wide = (torch.minimum(ax1, bx1) - torch.maximum(ax0, bx0)).clamp(min=0)
    common = wide * (torch.minimum(ay1, by1) - torch.maximum(ay0, by0)).clamp(min=0)
    union = (ax1 - ax0) * (ay1 - ay0) + (bx1 - bx0) * (by1 - by0) - common
    return common / union.clamp(min=1e-12)


def encode(boxes: Tensor, anchors: Tensor) -> Tensor:
    """Boxes as what the model predicts for their anchors."""
    centre, size = (boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]
    shift = (centre - anchors[..., :2]) / anchors[..., 2:] / CENTRE_VARIANCE
    growth = (size.clamp(min=1e-6) / anchors[..., 2:]).log() / SIZE_VARIANCE  # padding has no size
    return torch.cat((shift, growth), -1)


def decode(offsets: Tensor, anchors: Tensor) -> Tensor:
    """The boxes the model predicts; the inverse of `encode`."""
    centre = anchors[..., :2] + offsets[..., :2] * CENTRE_VARIANCE * anchors[..., 2:]
    size = anchors[..., 2:] * (offsets[..., 2:] * SIZE_VARIANCE).exp()
    return corners(torch.cat((centre, size), -1))


class Detections(NamedTuple):
    """What was found in each image, the surest first; places that are not used have the score 0."""

    boxes: Tensor
    """(B, 200, 4)"""
    scores: Tensor
    """(B, 200)"""
    labels: Tensor
    """(B, 200), from 1"""


def detect(offsets: Tensor, logits: Tensor, anchors: Tensor) -> Detections:
    """Decode what a model says, (B, A, 4) and (B, A, 1 + classes), and keep the best box of each object and class."""
    scores = logits.float().softmax(-1)[..., 1:].transpose(1, 2)  # (B, C, A)
    scores, candidates = scores.topk(min(MAX_DETECTIONS, scores.shape[-1]))  # (B, C, K)
    boxes = decode(offsets.float(), anchors).clamp(0, 1)
    boxes = _take(boxes, candidates.flatten(1))  # (B, C * K, 4)
    by_class = boxes.view(-1, candidates.shape[2], 4), scores.flatten(0, 1)
    kept = suppress(by_class[0], by_class[1] > MIN_SCORE).view_as(scores)
    scores, best = scores.where(kept, 0).flatten(1).topk(MAX_DETECTIONS)
    return Detections(_take(boxes, best), scores, 1 + best // candidates.shape[2])


def _take(boxes: Tensor, index: Tensor) -> Tensor:
    return boxes.gather(1, index.unsqueeze(2).expand(-1, -1, 4))


def suppress(boxes: Tensor, valid: Tensor) -> Tensor:
    """Greedy non-maximum suppression in each of N lists of boxes: which of them stay.

    Args:
        boxes: (N, K, 4), the surest first.
        valid: (N, K), False for boxes that neither stay nor suppress others.
    """
    kept = torch.zeros_like(valid)
    occupied = valid.any(1).nonzero().flatten()
    for start in range(0, len(occupied), 256):  # 256 lists of 200 boxes have 10 million pairs
        rows = occupied[start : start + 256]
        most = 1 + int(valid[rows].any(0).nonzero().max())
        kept[rows, :most] = _suppress(boxes[rows, :most], valid[rows, :most])
    return kept


def _suppress(boxes: Tensor, valid: Tensor) -> Tensor:
    """What the greedy loop finds, without the loop.

    A box stays unless one that stays, and comes before it, overlaps it. Applied again and again, this settles the
    boxes from the first to the last, and so ends at the one solution; in practice after a few rounds.
    """
    rivals = (iou(boxes, boxes) > NMS_IOU).triu(1)  # (N, K, K): the row comes before the column
    kept = valid
    while True:
        stay = valid & ~(rivals & kept.unsqueeze(2)).any(1)
        if torch.equal(stay, kept):
            return kept
        kept = stay
