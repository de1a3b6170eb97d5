"""The data augmentation of SSD, for whole batches.

The CPU draws a few numbers per picture: its view, whether it is mirrored, and its colours. The pixels are changed on
their device.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from growprune.tasks.detection.ssd import IMAGE_SIZE, iou

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MIN_IOUS = (0.1, 0.3, 0.5, 0.7, 0.9, 0.0, 0.0)
"""Minimum IoU of a crop with some object. 0.0 is no minimum, and the last 0.0 keeps the whole picture."""
NUM_TRIES = 50
MAX_CHANGES = (0.125, 0.5, 0.5, 0.05)
"""The largest change of brightness, contrast, saturation and hue."""
LUMA = (0.299, 0.587, 0.114)
RGB_TO_YIQ = (LUMA, (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


def draw_views(generator: np.random.Generator, boxes: Tensor, labels: Tensor, *, zoom_out: float) -> Tensor:
    """Draw a view of each picture: corners as fractions of the picture, (B, 4). Views that zoom out exceed [0, 1].

    Args:
        boxes: corners of the objects, (B, M, 4).
        labels: (B, M), 0 for no object.
        zoom_out: half of the pictures are placed on a canvas up to this many times as large per side.
    """
    factor = generator.uniform(1, zoom_out, (len(boxes), 1)) * np.ones(2)
    factor[generator.random(len(boxes)) < 0.5] = 1.0
    start = -generator.random((len(boxes), 2)) * (factor - 1)
    canvas = torch.from_numpy(np.concatenate((start, start + factor), 1)).float()

    # Draw crops of each canvas, and take the first that has the centre of an object and enough IoU with one.
    boxes, shape = seen_from(canvas, boxes), (len(boxes), NUM_TRIES)
    mode = generator.integers(len(MIN_IOUS), size=shape)
    is_whole = mode == len(MIN_IOUS) - 1
    size = np.where(is_whole[..., None], 1.0, generator.uniform(0.3, 1.0, (*shape, 2)))
    corner = generator.random((*shape, 2)) * (1 - size)
    crops = torch.from_numpy(np.concatenate((corner, corner + size), 2)).float()  # (B, T, 4)
    present = (labels > 0).unsqueeze(1)
    least = torch.tensor(MIN_IOUS)[torch.from_numpy(mode)].unsqueeze(2)
    overlaps = (iou(crops, boxes) >= least) & present  # (B, T, M)
    has_centre = (_contains(crops, boxes) & present).any(2)
    fits = torch.from_numpy(np.abs(np.log(size[..., 0] / size[..., 1])) <= math.log(2))
    good = torch.from_numpy(is_whole) | (fits & overlaps.any(2) & has_centre)
    first = good.byte().argmax(1)
    chosen = crops[torch.arange(len(crops)), first]
    chosen = chosen.where(good.any(1, keepdim=True), torch.tensor((0.0, 0.0, 1.0, 1.0)))
    sides = (canvas[:, 2:] - canvas[:, :2]).repeat(1, 2)
    return canvas[:, :2].repeat(1, 2) + chosen * sides


def _contains(crops: Tensor, boxes: Tensor) -> Tensor:
    """Return whether the centre of each box (B, M, 4) is in each crop (B, T, 4), as (B, T, M)."""
    centre = ((boxes[..., :2] + boxes[..., 2:]) / 2).unsqueeze(1)  # (B, 1, M, 2)
    start, end = crops[..., :2].unsqueeze(2), crops[..., 2:].unsqueeze(2)  # (B, T, 1, 2)
    return ((centre > start) & (centre < end)).all(3)


def seen_from(views: Tensor, boxes: Tensor) -> Tensor:
    """Return boxes (B, M, 4) as fractions of the view of their picture (B, 4)."""
    start, end = views[:, None, :2].repeat(1, 1, 2), views[:, None, 2:].repeat(1, 1, 2)
    return (boxes - start) / (end - start)


def crop_boxes(boxes: Tensor, labels: Tensor, views: Tensor, mirrored: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the objects whose centres are in view, cut them at its edges, and mirror those of mirrored pictures."""
    labels = labels.where(_contains(views.unsqueeze(1), boxes).squeeze(1), 0)
    boxes = seen_from(views, boxes).clamp(0, 1)
    flipped = torch.stack((1 - boxes[..., 2], boxes[..., 1], 1 - boxes[..., 0], boxes[..., 3]), 2)
    boxes = torch.where(mirrored.view(-1, 1, 1), flipped, boxes)
    return boxes.where(labels.unsqueeze(2) > 0, 0), labels


def show(pixels: Tensor, sizes: Tensor, views: Tensor, mirrored: Tensor) -> Tensor:
    """Render each view at 300 x 300 in [0, 1], with the mean colour outside its picture.

    A view is parallel to the axes, so it is two products with (output pixel, source pixel) weights. If it shrinks a
    picture, the weights average source pixels, as in Pillow.

    Args:
        pixels: uint8, (B, H, W, 3), each picture in the upper left corner.
        sizes: height and width of each, (B, 2).
    """
    mean = torch.tensor(MEAN, device=pixels.device).view(3, 1, 1)
    across = _weights(views[:, 0::2] * sizes[:, 1:], sizes[:, 1], pixels.shape[2])  # (B, 300, W)
    across = torch.where(mirrored.view(-1, 1, 1), across.flip(1), across)
    down = _weights(views[:, 1::2] * sizes[:, :1], sizes[:, 0], pixels.shape[1])  # (B, 300, H)
    with torch.autocast(pixels.device.type, enabled=False):
        centred = pixels.permute(0, 3, 1, 2).contiguous().float() / 255 - mean
        return down.unsqueeze(1) @ (centred @ across.mT.unsqueeze(1)) + mean


def _weights(ends: Tensor, length: Tensor, num_pixels: int) -> Tensor:
    """Return the weights of source pixels along an axis for each pixel of the view, whose ends are (B, 2)."""
    start, step = ends[:, :1], (ends[:, 1:] - ends[:, :1]) / IMAGE_SIZE
    centres = start + step * (torch.arange(IMAGE_SIZE, device=ends.device) + 0.5)  # (B, 300)
    pixels = torch.arange(num_pixels, device=ends.device) + 0.5
    reach = step.clamp(min=1).unsqueeze(2)
    length = length.view(-1, 1)
    weights = (1 - (pixels - centres.unsqueeze(2)).abs() / reach).clamp(min=0)
    weights = weights.where((pixels < length).unsqueeze(1), 0)
    weights = weights / weights.sum(2, keepdim=True).clamp(min=1e-6)
    inside = (centres >= 0) & (centres <= length)
    return weights.where(inside.unsqueeze(2), 0)


def draw_colours(generator: np.random.Generator, number: int) -> Tensor:
    """Draw a 3 x 3 colour matrix (brightness, saturation, hue) and a contrast for each picture, (B, 10)."""
    brightness, contrast, saturation, hue = (generator.uniform(-1, 1, (number, 4)) * MAX_CHANGES).T
    angle = 2 * np.pi * hue
    turn = np.zeros((number, 3, 3))
    turn[:, 0, 0] = 1
    turn[:, 1, 1], turn[:, 1, 2] = np.cos(angle), -np.sin(angle)
    turn[:, 2, 1], turn[:, 2, 2] = np.sin(angle), np.cos(angle)
    hues = np.linalg.inv(RGB_TO_YIQ) @ turn @ np.array(RGB_TO_YIQ)
    grey = np.ones((3, 1)) * np.array(LUMA)
    vivid = (1 + saturation)[:, None, None]
    matrix = (1 + brightness)[:, None, None] * (vivid * np.eye(3) + (1 - vivid) * grey) @ hues
    return torch.from_numpy(np.concatenate((matrix.reshape(-1, 9), 1 + contrast[:, None]), 1)).float()


def colour(images: Tensor, colours: Tensor) -> Tensor:
    """Change the colours of images in [0, 1], (B, 3, H, W)."""
    matrix, contrast = colours[:, :9].view(-1, 3, 3), colours[:, 9].view(-1, 1, 1, 1)
    changed = (matrix @ images.flatten(2)).view_as(images)
    luma = torch.tensor(LUMA, device=images.device).view(3, 1, 1)
    grey = (changed * luma).sum(1, keepdim=True).mean((2, 3), keepdim=True)
    return (grey + contrast * (changed - grey)).clamp(0, 1)


def normalise(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(values, device=images.device).view(3, 1, 1) for values in (MEAN, STD))
    return (images - mean) / std
