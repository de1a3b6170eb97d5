"""Images to classify: class folders or JPEG files packed into one file, decoded, cut and augmented.

Whole batches are augmented on the device that trains, as (B, H, W, 3) bytes until they are normalised. The caller draws
the random numbers.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.tasks.bad_records import BadRecords, check_split, cut_validation, find, read_arrays
from growprune.tasks.images import BILINEAR, Array, HeldImages, UnreadableImage, opened, to_rgb

LAYOUT = "DIR/train/<class>/*.jpg and DIR/val/<class>/*.jpg (jpg, jpeg or png), or a FILE.npz of packed JPEGs"
SUFFIXES = (".jpg", ".jpeg", ".png")
PACKED = ("data", "offsets", "labels", "split", "classes")
"""The arrays of a packed file: the bytes of all files, their offsets and the end of the last, the class of each file,
0 for training and 1 for test, and the names of the classes."""

KINDS = {"data": "u", "offsets": "iu", "labels": "iu", "split": "iub"}
"""Allowed numpy kinds of the arrays of numbers."""


@dataclass(frozen=True, eq=False)
class Source:
    """Encoded images, numbered from 0."""

    where: dict[str, str]
    """Name of the training and of the test split in messages."""
    labels: Array
    is_test: Array
    name: Callable[[int], str]
    """Returns the name of an image in messages."""
    open: Callable[[int], IO[bytes]]


def _open_file(data: str, paths: list[str], index: int) -> IO[bytes]:
    return Path(data, paths[index]).open("rb")


def _open_packed(data: Array, offsets: Array, index: int) -> IO[bytes]:
    return io.BytesIO(data[offsets[index] : offsets[index + 1]].tobytes())


@functools.cache
def load(data: str, num_classes: int) -> Source:
    """List the images of a data folder or packed file, and check labels and splits. Nothing is decoded."""
    source = _read_packed(data, num_classes) if data.endswith(".npz") else _read_folder(data, num_classes)
    wrong = np.unique(source.labels[(source.labels < 0) | (source.labels >= num_classes)]).tolist()
    if wrong:
        shown = ", ".join(map(str, wrong[:5])) + (", ..." if len(wrong) > 5 else "")
        raise GrowpruneError(
            f"labels must be 0 to {num_classes - 1} for task.num_classes={num_classes}, but {data} has {shown}"
        )
    for split, count in {"train": (~source.is_test).sum(), "test": source.is_test.sum()}.items():
        check_split(int(count), source.where[split], split, layout=LAYOUT)
    return source


@functools.cache
def splits(data: str, num_classes: int, num_validation: int) -> dict[str, Array]:
    """Return the images of each split. Validation images are drawn from the training images, always the same."""
    source = load(data, num_classes)
    train = np.flatnonzero(~source.is_test)
    rest, drawn = cut_validation(len(train), num_validation, data)
    return {"train": train[rest], "validation": train[drawn], "test": np.flatnonzero(source.is_test)}


@functools.cache
def report_bad(data: str, num_classes: int) -> Callable[[int, str], None]:
    """Return a function that counts images that cannot be read, separately for training and test."""
    source = load(data, num_classes)
    num_test = int(source.is_test.sum())
    train = BadRecords(source.where["train"], len(source.labels) - num_test)
    test = BadRecords(source.where["test"], num_test, always=1)
    return lambda index, why: (test if source.is_test[index] else train).skip(source.name(index), why)


def _read_folder(data: str, num_classes: int) -> Source:
    train, test = (find(data, name, layout=LAYOUT) for name in ("train", "val"))
    classes, in_val = (
        sorted(entry.name for entry in split.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        for split in (train, test)
    )
    _check_classes(f"{data}: train", len(classes), num_classes)
    if foreign := set(in_val) - set(classes):
        raise GrowpruneError(
            f"{data}: val has the class {min(foreign)!r}, which train does not have. Remove it, or add it to train"
        )
    paths, labels, is_test = [], [], []
    for split in (train, test):
        for label, name in enumerate(classes):
            files = sorted(file.name for file in (split / name).glob("*"))  # val may lack classes
            found = [f"{split.name}/{name}/{file}" for file in files if file.lower().endswith(SUFFIXES)]
            paths += found
            labels += [label] * len(found)
            is_test += [split is test] * len(found)
    trained = {label for label, test in zip(labels, is_test, strict=True) if not test}
    if trained and (empty := [name for label, name in enumerate(classes) if label not in trained]):
        raise GrowpruneError(f"{train / empty[0]} has no images. Expected {LAYOUT}. Remove the folder, or add images")
    where, arrays = {"train": str(train), "test": str(test)}, (np.array(labels, np.int64), np.array(is_test, bool))
    return Source(where, *arrays, paths.__getitem__, functools.partial(_open_file, data, paths))


def _read_packed(data: str, num_classes: int) -> Source:
    found = read_arrays(find(data, "", layout=LAYOUT), PACKED)
    for name, array in found.items():
        if array.ndim != 1:
            raise GrowpruneError(f"{data}: {name} must have 1 dimension, got {array.ndim}")
        if array.dtype.kind not in KINDS.get(name, array.dtype.kind) or (name == "data" and array.itemsize > 1):
            expected = "uint8" if name == "data" else "integers"
            raise GrowpruneError(f"{data}: {name} must be {expected}, got {array.dtype}")
    offsets, count = found["offsets"], len(found["labels"])
    if len(offsets) != count + 1 or len(found["split"]) != count:
        raise GrowpruneError(
            f"{data} has {count} labels, {len(found['split'])} splits and {len(offsets)} offsets. It needs the same "
            f"number of splits as labels, and one more offset"
        )
    if offsets[0] < 0 or offsets[-1] > len(found["data"]) or (np.diff(offsets.astype(np.int64)) < 0).any():
        raise GrowpruneError(f"{data}: offsets must increase and stay within the {len(found['data'])} bytes of data")
    if wrong := sorted(set(found["split"].tolist()) - {0, 1}):
        raise GrowpruneError(f"{data}: split must be 0 (train) or 1 (test), got {wrong[0]}")
    _check_classes(data, len(found["classes"]), num_classes)
    labels, is_test = found["labels"].astype(np.int64), found["split"] == 1
    read = functools.partial(_open_packed, found["data"], found["offsets"].astype(np.int64))
    return Source({"train": data, "test": data}, labels, is_test, "image {}".format, read)


def _check_classes(where: str, found: int, num_classes: int) -> None:
    if found != num_classes:
        raise GrowpruneError(
            f"{where} has {found} classes, but num_classes is {num_classes}. Set task.num_classes={found}"
        )


# Augmentation

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


# Decoding

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
    # Area and shape of each box to try; the last row is the place of the chosen box.
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
    """Decode an image of a source, given by its number."""

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
    """Return the readable images of each split. All images must be decoded to know them."""
    good = held(data, num_classes, workers).good
    found = {name: indices[good[indices]] for name, indices in splits(data, num_classes, num_validation).items()}
    for name, indices in found.items():
        check_split(len(indices), data, name)
    return found
