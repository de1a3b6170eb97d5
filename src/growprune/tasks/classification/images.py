"""Cuts boxes out of images and decodes them, as they are needed or all at once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from growprune.errors import GrowpruneError
from growprune.tasks.bad_records import check_split
from growprune.tasks.classification.augment import NUM_TRIES, draw_boxes, generator
from growprune.tasks.classification.sources import Source, bad_images, load, splits
from growprune.tasks.images import BILINEAR, Array, HeldImages, UnreadableImage, opened, to_rgb

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
    """Draw the box of a random resized crop. It depends only on the seed and the number of the image."""
    numbers = torch.rand(1, NUM_TRIES + 1, 2, generator=generator("cpu", seed, index))
    left, top, right, bottom = draw_boxes(numbers, width, height, min_scale)[0].tolist()
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


def report_bad(source: Source, data: str, num_classes: int) -> Callable[[int, str], None]:
    """Return a function that counts images that cannot be read, for training and for test apart."""
    bad = bad_images(data, num_classes)
    return lambda index, why: bad[bool(source.is_test[index])].skip(source.name(index), why)


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
        raise GrowpruneError(f"{source.where}: none of the {len(source.labels)} images can be read. Check the files")
    report = report_bad(source, data, num_classes)
    decoder = Decoder(source, size, None)
    return HeldImages(decoder, len(source.labels), report, workers=workers, size=(height, width))


@functools.cache
def readable(data: str, num_classes: int, num_validation: int, workers: int) -> dict[str, Array]:
    """Return the readable images of each split. Decodes all images to know them."""
    good = held(data, num_classes, workers).good
    found = {name: indices[good[indices]] for name, indices in splits(data, num_classes, num_validation).items()}
    for name, indices in found.items():
        check_split(len(indices), data, name)
    return found
