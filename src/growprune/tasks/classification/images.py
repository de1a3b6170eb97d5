"""Reads images: worker processes decode them when they are needed, or all are decoded once and kept on the device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from growprune.errors import GrowpruneError
from growprune.tasks.bad_records import BadRecords, check_split
from growprune.tasks.classification.augment import NUM_TRIES, draw_boxes, generator
from growprune.tasks.classification.sources import Array, Source, bad_images, load, splits
from growprune.tasks.image_loading import decoding, pillow, to_rgb, unreadable

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


@dataclass(frozen=True, eq=False)
class Reader(Dataset[tuple[int, "Array | str | None"]]):
    """Decodes one image at a time: its number and pixels (H, W, 3), or the reason why it cannot be read.

    For (number, False) it decodes nothing: the image only keeps its place in the batch.
    """

    source: Source
    size: tuple[int, int]
    """Width and height of all decoded images."""
    boxes: Boxes | None
    """Returns the box to cut out of each image. None: the whole image, which must have the right size."""

    def __getitem__(self, wanted: tuple[int, bool]) -> tuple[int, Array | str | None]:
        index, is_wanted = wanted
        if not is_wanted:
            return index, None
        image_module = pillow("classification")
        try:
            with self.source.open(index) as file:
                return index, self.decode(image_module, file, index)
        except unreadable(image_module) as error:
            return index, str(error) or type(error).__name__

    def decode(self, image_module: Any, file: IO[bytes], index: int) -> Array:
        with image_module.open(file) as image:
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
            return np.array(to_rgb(image).resize(self.size, image_module.Resampling.BILINEAR, box=box))


def all_of(count: int) -> Array:
    return np.ones(count, dtype=bool)


def read(
    reader: Reader,
    groups: Sequence[Array],
    account: dict[bool, BadRecords],
    *,
    workers: int,
    device: torch.device,
    wanted: Callable[[int], Array] = all_of,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Decode groups of images in order. Yields pixels (B, H, W, 3), and a mask of the readable images (B) on the CPU.

    Images that cannot be read or are not wanted are black.

    Args:
        wanted: returns a mask of the wanted images of a group, from its size.
    """
    batches = [list(zip(group.tolist(), wanted(len(group)).tolist(), strict=True)) for group in groups]
    collate = functools.partial(_collate, size=reader.size)
    for pixels, is_good, bad in decoding(reader, batches, collate, workers=workers, device=device):
        for index, why in bad:
            account[bool(reader.source.is_test[index])].skip(reader.source.name(index), why)
        yield pixels.to(device, non_blocking=True), is_good


def _collate(
    items: list[tuple[int, Array | str | None]], size: tuple[int, int]
) -> tuple[Tensor, Tensor, list[tuple[int, str]]]:
    pixels = torch.zeros(len(items), size[1], size[0], 3, dtype=torch.uint8)
    for place, (_, image) in enumerate(items):
        if isinstance(image, np.ndarray):
            pixels[place] = torch.from_numpy(image)
    bad = [(index, why) for index, why in items if isinstance(why, str)]
    return pixels, torch.tensor([not isinstance(image, str) for _, image in items]), bad


@dataclass(frozen=True, eq=False)
class Decoded:
    """All images of a source, in memory."""

    pixels: Tensor
    """(N, H, W, 3); images that cannot be read are black and must not be used."""
    labels: Tensor
    is_good: Array
    """True for images that could be read."""


@functools.cache
def decode_all(data: str, num_classes: int, workers: int) -> Decoded:
    """Decode images of equal size, once per process."""
    source, account = load(data, num_classes), bad_images(data, num_classes)
    image_module = pillow("classification")
    for index in range(len(source.labels)):  # the size is that of the first image that can be opened
        try:
            with source.open(index) as file, image_module.open(file) as image:
                width, height = size = image.size
                break
        except unreadable(image_module):
            continue  # decoding will report it
    else:
        raise GrowpruneError(f"{source.where}: none of the {len(source.labels)} images can be read. Check the files")
    count, cpu = len(source.labels), torch.device("cpu")
    pixels = torch.zeros(count, height, width, 3, dtype=torch.uint8)
    is_good = np.zeros(count, dtype=bool)
    groups = np.array_split(np.arange(count), -(-count // 500))
    found = read(Reader(source, size, None), groups, account, workers=workers, device=cpu)
    for indices, (some, good) in zip(groups, found, strict=True):
        pixels[indices], is_good[indices] = some, good.numpy()
    return Decoded(pixels, torch.from_numpy(source.labels), is_good)


@functools.cache
def readable(data: str, num_classes: int, num_validation: int, workers: int) -> dict[str, Array]:
    """Return the readable images of each split. Decodes all images to know them."""
    is_good = decode_all(data, num_classes, workers).is_good
    found = {name: indices[is_good[indices]] for name, indices in splits(data, num_classes, num_validation).items()}
    for name, indices in found.items():
        check_split(len(indices), data, name)
    return found


@functools.cache
def decode_to(data: str, num_classes: int, workers: int, device: torch.device) -> Decoded:
    """Decode all images and copy them to a device, once."""
    decoded = decode_all(data, num_classes, workers)
    return Decoded(decoded.pixels.to(device), decoded.labels.to(device), decoded.is_good)
