"""The loss of SSD: where the boxes are, and what they hold, over the matched anchors and the hardest others."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from growprune.tasks.detection.anchors import match
from growprune.tasks.detection.boxes import encode

NEGATIVES_PER_POSITIVE = 3


def multibox_loss(offsets: Tensor, logits: Tensor, boxes: Tensor, labels: Tensor, anchors: Tensor) -> Tensor:
    """The mean over images of (localisation + classification) / matched anchors; 0 for an image without objects.

    Args:
        offsets: as predicted, (B, A, 4).
        logits: as predicted, (B, A, 1 + classes); class 0 is the background.
        boxes: corners of the objects, (B, M, 4).
        labels: of the objects, from 1, (B, M); 0 where there is none.
        anchors: (A, 4).
    """
    targets, classes = match(boxes, labels, anchors)
    positive = classes > 0
    num_positive = positive.sum(1)  # (B)
    distance = F.smooth_l1_loss(offsets.float(), encode(targets, anchors), reduction="none").sum(2)
    localisation = distance.where(positive, 0).sum(1)
    surprise = F.cross_entropy(logits.float().transpose(1, 2), classes, reduction="none")  # (B, A)
    hardest = surprise.where(~positive, 0).sort(1, descending=True).values
    rank = torch.arange(len(anchors), device=anchors.device)
    mined = hardest.where(rank < NEGATIVES_PER_POSITIVE * num_positive.unsqueeze(1), 0).sum(1)
    total = localisation + surprise.where(positive, 0).sum(1) + mined
    return (total / num_positive.clamp(min=1)).mean()
