"""Data augmentation of whole batches, on the device that trains.

Images are (B, H, W, 3) bytes until they are normalised. The caller draws the random numbers.
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
"""The smallest and the largest ratio of width to height of a resized crop."""


def generator(device: torch.device | str, *seeds: int) -> torch.Generator:
    """Return a generator that is seeded with all of the seeds."""
    state = np.random.SeedSequence(seeds).generate_state(1, np.uint64)
    return torch.Generator(device).manual_seed(int(state[0]))


def flipped(images: Tensor, which: Tensor) -> Tensor:
    """Mirror the images for which `which` is true."""
    return torch.where(which[:, None, None, None], images.flip(2), images)


def shifted(images: Tensor, offsets: Tensor) -> Tensor:
    """Pad images with black, and cut images of the same size out of them.

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
    """Return the boxes (left, top, right, bottom) of random resized crops, in pixels.

    Args:
        numbers: (B, NUM_TRIES + 1, 2) in [0, 1): area and shape of each box to try, and in the last row its place.
        min_scale: the smallest area, as a fraction of the image.
    """
    areas = width * height * (min_scale + (1 - min_scale) * numbers[:, :-1, 0])
    low, high = (math.log(ratio) for ratio in RATIOS)
    ratios = (low + (high - low) * numbers[:, :-1, 1]).exp()
    sides = torch.stack([(areas * ratios).sqrt(), (areas / ratios).sqrt()], -1)  # (B, tries, 2): width, height
    # If none fits, as in a panorama, take the largest box of an allowed shape.
    last = sides.new_ones(len(sides), 1, 2)
    last[:, :, 0] *= min(width, height * RATIOS[1])
    last[:, :, 1] *= min(height, width / RATIOS[0])
    sides = torch.cat([sides, last], 1)
    fits = (sides[..., 0] <= width) & (sides[..., 1] <= height)
    taken = fits.int().argmax(1)  # the first that fits
    side = sides.gather(1, taken[:, None, None].expand(-1, 1, 2))[:, 0]
    space = torch.stack([width - side[:, 0], height - side[:, 1]], 1)
    corner = space * numbers[:, -1]
    return torch.cat([corner, corner + side], 1)


def normalised(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Normalise bytes to about mean 0 and standard deviation 1. `mean` and `std` are for values in [0, 1]."""
    factor, shift = _moments(mean, std, images.device)
    return images.float().mul_(factor).add_(shift)


@functools.cache
def _moments(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and std on the device. Cached, because copying them for every batch would make the GPU wait."""
    factor = 1 / (255 * torch.tensor(std, dtype=torch.float64))
    shift = -torch.tensor(mean, dtype=torch.float64) * 255 * factor
    return factor.float().to(device), shift.float().to(device)


def mixed(images: Tensor, share: float) -> Tensor:
    """Apply mixup (Zhang et al., 2018): mix each image with the one before it in the batch. The order is random."""
    return share * images + (1 - share) * images.roll(1, 0)
