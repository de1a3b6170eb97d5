"""SSD300 v1.1 (Liu et al., 2016) with a ResNet as its backbone, as in NVIDIA's DeepLearningExamples.

A box is given by its corners (x0, y0, x1, y1), an anchor by its centre and size, both as fractions of the image.
"""

from __future__ import annotations

import functools
import itertools
import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.tasks.classification.resnet import KINDS, Name, ResNet

IMAGE_SIZE = 300
FEATURE_SIZES = (38, 19, 10, 5, 3, 1)
STEPS = (8, 16, 32, 64, 100, 300)
"""Distance between cells of each feature map, in pixels of the image."""
SCALES = (21, 45, 99, 153, 207, 261, 315)
"""Sides of the square boxes of the feature maps, in pixels, and of one more map."""
ASPECTS = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))
BOXES_PER_CELL = tuple(2 + 2 * len(aspects) for aspects in ASPECTS)
MATCH_IOU = 0.5


@functools.cache
def default_boxes(device: torch.device) -> Tensor:
    """Return all default boxes as (centre x, centre y, width, height) in fractions of the image, (8732, 4).

    Their order is that of the model's outputs: feature map, box of the cell, row, column.
    """
    boxes = []
    for level, size in enumerate(FEATURE_SIZES):
        step, (small, large) = STEPS[level] / IMAGE_SIZE, (scale / IMAGE_SIZE for scale in SCALES[level : level + 2])
        middle = math.sqrt(small * large)
        sizes = [(small, small), (middle, middle)]  # two squares, then the others, wide and high
        for aspect in ASPECTS[level]:
            long, short = small * math.sqrt(aspect), small / math.sqrt(aspect)
            sizes += [(long, short), (short, long)]
        cells = list(itertools.product((cell + 0.5 for cell in range(size)), repeat=2))
        boxes += [(column * step, row * step, *sides) for sides in sizes for row, column in cells]
    return torch.tensor(boxes, device="cpu").clamp(0, 1).to(device)


def match(boxes: Tensor, labels: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """Assign an object to each anchor: the box of its target and its label, 0 for background.

    An anchor gets the object that it overlaps most, if their IoU is above 0.5. The best anchor of an object gets it at
    any IoU. If several objects have the same best anchor, it gets the one that overlaps it most.

    Args:
        boxes: corners, as fractions of the image, (B, M, 4).
        labels: (B, M), 0 for no object.
        anchors: the result of `default_boxes`, (A, 4).
    """
    absent = (labels == 0).unsqueeze(1)
    overlap = iou(corners(anchors).unsqueeze(0), boxes).masked_fill(absent, -1)  # (B, A, M)
    best_anchor = overlap.argmax(1, keepdim=True)  # (B, 1, M)
    claimed = torch.arange(len(anchors), device=boxes.device).view(1, -1, 1) == best_anchor
    overlap = torch.where(claimed & ~absent, overlap + 2, overlap)  # above all unclaimed ones
    best, index = overlap.max(2)  # (B, A)
    matched = labels.gather(1, index).where(best > MATCH_IOU, 0)
    return _take(boxes, index), matched


CENTRE_VARIANCE, SIZE_VARIANCE = 0.1, 0.2
NMS_IOU = 0.5
MIN_SCORE = 0.05
MAX_DETECTIONS = 200


def corners(boxes: Tensor) -> Tensor:
    """Convert (centre, size) to (corner, corner)."""
    centre, size = boxes[..., :2], boxes[..., 2:]
    return torch.cat((centre - size / 2, centre + size / 2), -1)


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Return the IoU of each box of a, (..., N, 4), with each of b, (..., M, 4), as (..., N, M).

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
    """Return the offsets that the model should predict for boxes and their anchors."""
    centre, size = (boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]
    shift = (centre - anchors[..., :2]) / anchors[..., 2:] / CENTRE_VARIANCE
    growth = (size.clamp(min=1e-6) / anchors[..., 2:]).log() / SIZE_VARIANCE  # padding has no size
    return torch.cat((shift, growth), -1)


def decode(offsets: Tensor, anchors: Tensor) -> Tensor:
    """Return boxes from predicted offsets: the inverse of `encode`."""
    centre = anchors[..., :2] + offsets[..., :2] * CENTRE_VARIANCE * anchors[..., 2:]
    size = anchors[..., 2:] * (offsets[..., 2:] * SIZE_VARIANCE).exp()
    return corners(torch.cat((centre, size), -1))


def detect(offsets: Tensor, logits: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Decode offsets (B, A, 4) and logits (B, A, 1 + classes), and keep the best box of each object and class.

    Returns boxes (B, 200, 4), their scores and their labels from 1 (B, 200), highest score first. Unused entries have
    score 0.
    """
    scores = logits.float().softmax(-1)[..., 1:].transpose(1, 2)  # (B, C, A)
    scores, candidates = scores.topk(min(MAX_DETECTIONS, scores.shape[-1]))  # (B, C, K)
    boxes = decode(offsets.float(), anchors).clamp(0, 1)
    boxes = _take(boxes, candidates.flatten(1))  # (B, C * K, 4)
    by_class = boxes.view(-1, candidates.shape[2], 4), scores.flatten(0, 1)
    kept = suppress(by_class[0], by_class[1] > MIN_SCORE).view_as(scores)
    scores, best = scores.where(kept, 0).flatten(1).topk(MAX_DETECTIONS)
    return _take(boxes, best), scores, 1 + best // candidates.shape[2]


def _take(boxes: Tensor, index: Tensor) -> Tensor:
    return boxes.gather(1, index.unsqueeze(2).expand(-1, -1, 4))


def suppress(boxes: Tensor, valid: Tensor) -> Tensor:
    """Apply greedy non-maximum suppression to each of N lists of boxes. Returns a mask of the boxes that stay.

    Args:
        boxes: (N, K, 4), in descending order of scores.
        valid: (N, K), False for boxes to ignore.
    """
    kept = torch.zeros_like(valid)
    occupied = valid.any(1).nonzero().flatten()
    for start in range(0, len(occupied), 256):  # 256 lists of 200 boxes have 10 million pairs
        rows = occupied[start : start + 256]
        most = 1 + int(valid[rows].any(0).nonzero().max())
        some, candidates = boxes[rows, :most], valid[rows, :most]
        overlapping = (iou(some, some) > NMS_IOU).triu(1)  # (N, K, K): the row is the earlier box
        # A box stays unless an earlier box that stays overlaps it. Repeating this rule settles the boxes from the first
        # to the last, so it ends at the only solution, in practice after a few rounds.
        before, stay = None, candidates
        while before is None or not torch.equal(stay, before):
            before, stay = stay, candidates & ~(overlapping & stay.unsqueeze(2)).any(1)
        kept[rows, :most] = stay
    return kept


NEGATIVES_PER_POSITIVE = 3


def multibox_loss(offsets: Tensor, logits: Tensor, boxes: Tensor, labels: Tensor, anchors: Tensor) -> Tensor:
    """Return the mean over images of (localisation + classification) / matched anchors; 0 for an image without objects.

    Args:
        offsets: predictions, (B, A, 4).
        logits: predictions, (B, A, 1 + classes); class 0 is the background.
        boxes: corners of the objects, (B, M, 4).
        labels: labels of the objects from 1, (B, M); 0 for no object.
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
        maps = list(zip(channels, BOXES_PER_CELL, strict=True))
        self.loc = nn.ModuleList(Convolution(inputs, 4 * boxes, 3, padding=1) for inputs, boxes in maps)
        outputs = 1 + num_classes
        self.conf = nn.ModuleList(Convolution(inputs, outputs * boxes, 3, padding=1) for inputs, boxes in maps)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return offsets from the anchors (B, 8732, 4) and logits (B, 8732, 1 + classes) of images (B, 3, 300, 300)."""
        maps = [self.backbone(images)]
        for block in self.additional_blocks:
            maps.append(block(maps[-1]))
        return _read(self.loc, maps, 4), _read(self.conf, maps, 1 + self.num_classes)


def _block(inputs: int, middle: int, outputs: int, *, shrinks: bool) -> nn.Sequential:
    """Return a 1 x 1 and a 3 x 3 convolution, which halves the map or removes its border."""
    stride, padding = (2, 1) if shrinks else (1, 0)
    return nn.Sequential(
        Convolution(inputs, middle, 1, bias=False),
        nn.BatchNorm2d(middle),
        nn.ReLU(),
        Convolution(middle, outputs, 3, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


def _read(heads: nn.ModuleList, maps: list[Tensor], num_values: int) -> Tensor:
    """Apply the heads. Returns values of all anchors, (B, A, num_values), in the order of `default_boxes`."""
    values = [head(x).unflatten(1, (num_values, -1)).flatten(2) for head, x in zip(heads, maps, strict=True)]
    return torch.cat(values, 2).transpose(1, 2)
