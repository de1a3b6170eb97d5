"""Random changes of training images, for a whole batch at once, on the device where it is used.

Images are (B, H, W, 3) bytes until they are normalised. What is drawn comes from a generator that the caller seeds.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

PADDING = 4
"""Black pixels added on every side for a padded crop."""
NUM_TRIES = 10
"""Boxes drawn for a resized crop. The first that fits is used."""
RATIOS = (3 / 4, 4 / 3)
"""The narrowest and the widest box of a resized crop, as width by height."""


def generator(device: torch.device | str, *seeds: int) -> torch.Generator:
    """A generator whose numbers depend on all of the seeds."""
    state = np.random.SeedSequence(seeds).generate_state(1, np.uint64)
    return torch.Generator(device).manual_seed(int(state[0]))


def flipped(images: Tensor, which: Tensor) -> Tensor:
    """Swap left and right of the images for which `which`, a bool each, is true."""
    return torch.where(which[:, None, None, None], images.flip(2), images)


def shifted(images: Tensor, offsets: Tensor) -> Tensor:
    """Pad with black and cut out what has the size of the images.

    Args:
        offsets: (B, 2) integers from 0 to 2 * PADDING: the row and column of the padded image to cut from.
    """
    batch, height, width, channels = images.shape
    rows = offsets[:, :1] - PADDING + torch.arange(height, device=images.device)  # (B, H)
    columns = offsets[:, 1:] - PADDING + torch.arange(width, device=images.device)  # (B, W)
    is_inside = _is_within(rows, height)[:, :, None] & _is_within(columns, width)[:, None, :]
    first = height * torch.arange(batch, device=images.device)
    flat = (first[:, None] + rows.clamp(0, height - 1))[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]
    return images.reshape(-1, channels)[flat] * is_inside[..., None]


def _is_within(positions: Tensor, length: int) -> Tensor:
    return (positions >= 0) & (positions < length)


def draw_boxes(numbers: Tensor, width: int, height: int, min_scale: float) -> Tensor:
    """The boxes (left, top, right, bottom) of random resized crops, in pixels.

    Args:
        numbers: (B, NUM_TRIES + 1, 2) from 0 to 1: area and shape of each box to try, and at last its place.
        min_scale: the smallest area, as a share of the image's; the largest is 1.
    """
    areas = width * height * (min_scale + (1 - min_scale) * numbers[:, :-1, 0])
    low, high = (math.log(ratio) for ratio in RATIOS)
    ratios = (low + (high - low) * numbers[:, :-1, 1]).exp()
    sides = torch.stack([(areas * ratios).sqrt(), (areas / ratios).sqrt()], -1)  # (B, tries, 2): width, height
    # Where none fits, as in a panorama, the largest box of an allowed shape does.
    last = sides.new_ones(len(sides), 1, 2)
    last[:, :, 0] *= min(width, height * RATIOS[1])
    last[:, :, 1] *= min(height, width / RATIOS[0])
    sides = torch.cat([sides, last], 1)
    fits = (sides[..., 0] <= width) & (sides[..., 1] <= height)
    taken = fits.int().argmax(1)  # of equals, the first
    side = sides.gather(1, taken[:, None, None].expand(-1, 1, 2))[:, 0]
    space = torch.stack([width - side[:, 0], height - side[:, 1]], 1)
    corner = space * numbers[:, -1]
    return torch.cat([corner, corner + side], 1)


def normalised(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Bytes as numbers of about mean 0 and deviation 1; `mean` and `std` are of values from 0 to 1."""
    factor, shift = _moments(mean, std, images.device)
    return images.float().mul_(factor).add_(shift)


@functools.cache
def _moments(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and std on the device. Cached, because copying them for every batch would make the GPU wait."""
    factor = 1 / (255 * torch.tensor(std, dtype=torch.float64))
    shift = -torch.tensor(mean, dtype=torch.float64) * 255 * factor
    return factor.float().to(device), shift.float().to(device)


def mixed(images: Tensor, share: float) -> Tensor:
    """Mixup (Zhang et al., 2018): `share` of each image, and the rest of the one before it in the batch.

    The batch is in random order, so that the one before is as random as any.
    """
    return share * images + (1 - share) * images.roll(1, 0)
