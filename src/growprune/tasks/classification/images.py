"""Cuts, decodes and augments images.

Whole batches are augmented on the device that trains, as (B, H, W, 3) bytes until they are normalised. The caller draws
the random numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.tasks.bad_records import check_split
from growprune.tasks.classification.sources import Source, load, report_bad, splits
from growprune.tasks.images import BILINEAR, Array, HeldImages, UnreadableImage, opened, to_rgb

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


Box = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels."""
Boxes = Callable[[int, int, int], Box]
"""Returns the box to cut out of an image, from its number, width and height."""

CENTRE = 224 / 256
"""The fraction of the shorter side that is evaluated."""


def centre_box(index: int, width: int, height: int) -> Box:
    """Return the box of a centre crop: the central 224 x 224 if the shorter side had 256 pixels."""
    del index
    side = CENTRE * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(index: int, width: int, height: int, *, seed: int, min_scale: float) -> Box:
    """Draw the box of a random resized crop. It depends only on the seed and the number of the image.

    Args:
        min_scale: the smallest area, as a fraction of the image.
    """
    # Area and shape of each box to try, and in the last row its place.
    numbers = torch.rand(NUM_TRIES + 1, 2, generator=generator("cpu", seed, index))
    areas = width * height * (min_scale + (1 - min_scale) * numbers[:-1, 0])
    low, high = (math.log(ratio) for ratio in RATIOS)
    ratios = (low + (high - low) * numbers[:-1, 1]).exp()
    sides = torch.stack([(areas * ratios).sqrt(), (areas / ratios).sqrt()], -1)  # (tries, 2): width, height
    # If none fits, as in a panorama, take the largest box of an allowed shape.
    last = sides.new_tensor([[min(width, height * RATIOS[1]), min(height, width / RATIOS[0])]])
    sides, whole = torch.cat([sides, last]), sides.new_tensor([width, height])
    side = sides[(sides <= whole).all(1).int().argmax()]  # the first that fits
    corner = (whole - side) * numbers[-1]
    left, top, right, bottom = torch.cat([corner, corner + side]).tolist()
    return left, top, min(right, width), min(bottom, height)  # rounding may exceed them


@dataclass(frozen=True)
class Decoder:
    """Decodes an image of a source, given by its number."""

    source: Source
    size: tuple[int, int]
    """Width and height of all decoded images."""
    boxes: Boxes | None
    """Returns the box to cut out of each image. None: the whole image, which must have the right size."""

    def __call__(self, index: int) -> Array:
        with self.source.open(index) as file, opened(file, "classification") as image:
            width, height = image.size
            if self.boxes is None:
                if image.size != self.size:
                    given, wanted = (f"{across} x {down}" for across, down in (image.size, self.size))
                    raise GrowpruneError(
                        f"its size is {given}, not {wanted}. For images of several sizes, set task.in_memory=false and "
                        f"task.crop=resized"
                    )
                return np.array(to_rgb(image))
            left, top, right, bottom = self.boxes(index, width, height)
            across, down = self.size[0] / (right - left), self.size[1] / (bottom - top)
            # A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size, which saves most of the time if that is enough.
            image.draft("RGB", (math.ceil(width * across), math.ceil(height * down)))
            x, y = image.size[0] / width, image.size[1] / height
            box = left * x, top * y, min(right * x, image.size[0]), min(bottom * y, image.size[1])
            return np.array(to_rgb(image).resize(self.size, BILINEAR, box=box))


@functools.cache
def held(data: str, num_classes: int, workers: int) -> HeldImages:
    """Decode all images, which must have the size of the first that can be opened, once per process."""
    source = load(data, num_classes)
    for index in range(len(source.labels)):
        try:
            with source.open(index) as file, opened(file, "classification") as image:
                width, height = size = image.size
                break
        except (OSError, UnreadableImage):
            continue  # decoding will report it
    else:
        raise GrowpruneError(f"{data}: none of the {len(source.labels)} images can be read. Check the files")
    report, decoder = report_bad(data, num_classes), Decoder(source, size, None)
    return HeldImages(decoder, len(source.labels), report, workers=workers, size=(height, width))


@functools.cache
def readable(data: str, num_classes: int, num_validation: int, workers: int) -> dict[str, Array]:
    """Return the readable images of each split. Decodes all images to know them."""
    good = held(data, num_classes, workers).good
    found = {name: indices[good[indices]] for name, indices in splits(data, num_classes, num_validation).items()}
    for name, indices in found.items():
        check_split(len(indices), data, name)
    return found
