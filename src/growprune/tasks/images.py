"""Images for tasks: worker processes decode them when they are needed, or all are decoded once and kept on the device.

Each replica decodes only the images that it uses.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from growprune.errors import GrowpruneError, need
from growprune.tasks.task import Task, num_cores

Array = npt.NDArray[Any]
Decode = Callable[[int], Array]
"""Returns the pixels (height, width, 3) of an image, from its number. Raises UnreadableImage or OSError."""
Report = Callable[[int, str], None]
"""Is called with the number of each image that cannot be read, and the reason."""

BILINEAR = 2
"""The number of this filter in Pillow, which need not be installed."""
BLANK = np.zeros((1, 1, 3), dtype=np.uint8)
"""Placeholder for an image that cannot be read or is not used."""


class Pictures(NamedTuple):
    """Some images in one tensor, each in the upper left corner. Padding, and images that are not read, are black."""

    pixels: Tensor
    """uint8, (B, H, W, 3)"""
    sizes: Tensor
    """Height and width of each, (B, 2)."""
    good: Tensor
    """False for images that cannot be read, (B), on the CPU."""


class ImageTask(Task):
    """A task whose streamed images are decoded only by the replica that uses them."""

    _replica = 0, 1

    def for_replica(self, index: int, count: int) -> Self:
        task = copy.copy(self)
        # not a field of the dataclass, because it does not change results
        object.__setattr__(task, "_replica", (index, count))
        return task

    def _used(self, batch_size: int) -> Array:
        """Return a mask of the images of a batch that this replica uses."""
        index, count = self._replica
        mask: Array = np.arange(batch_size) % count == index
        return mask


class UnreadableImage(GrowpruneError):
    """An image cannot be read."""


@contextlib.contextmanager
def opened(file: Path | IO[bytes], extra: str) -> Iterator[Any]:
    """Open an image with Pillow. In this context, a broken file, or one that is not an image, raises UnreadableImage.

    Args:
        extra: the extra of growprune that installs Pillow.
    """
    pillow = need("PIL.Image", extra, "reading images needs Pillow")
    try:
        with pillow.open(file) as image:
            yield image
    except (OSError, ValueError, SyntaxError, RuntimeError, pillow.DecompressionBombError) as error:
        raise UnreadableImage(str(error) or type(error).__name__) from error


def to_rgb(image: Any) -> Any:
    """Convert a Pillow image to RGB. Raise for more than 8 bits, because Pillow turns most such images white."""
    if image.mode.startswith(("I", "F")):
        raise GrowpruneError(f"images must have 8 bits, got Pillow mode {image.mode!r}. Convert the image")
    return image.convert("RGB")


def read(
    decode: Decode,
    batches: Sequence[Array],
    report: Report,
    *,
    workers: int,
    device: torch.device,
    used: Callable[[int], Array] | None = None,
    size: tuple[int, int] = (1, 1),
) -> Iterator[Pictures]:
    """Decode batches of images, given by their numbers, in order.

    Args:
        used: returns a mask of the images of a batch that are needed, from its size. By default, all are.
        size: minimum height and width of the tensors.
    """
    masks = [np.ones(len(batch), dtype=bool) if used is None else used(len(batch)) for batch in batches]
    wanted = [list(zip(batch.tolist(), mask.tolist(), strict=True)) for batch, mask in zip(batches, masks, strict=True)]
    loader: DataLoader[Any] = DataLoader(
        _Decoder(decode),
        batch_sampler=wanted,
        num_workers=min(workers, num_cores()),  # more workers are slower, and torch warns
        collate_fn=partial(_collate, size=size),
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # without it, the loader would change the global generator
    )
    for (pixels, sizes, good), bad in loader:
        for index, why in bad:
            report(index, why)
        yield Pictures(pixels.to(device, non_blocking=True), sizes.to(device, non_blocking=True), good)


@dataclass(frozen=True, eq=False)
class _Decoder(Dataset[tuple[int, Array | str]]):
    decode: Decode

    def __getitem__(self, wanted: tuple[int, bool]) -> tuple[int, Array | str]:
        index, is_wanted = wanted
        if not is_wanted:
            return index, BLANK
        try:
            return index, self.decode(index)
        except (OSError, UnreadableImage) as error:
            return index, str(error)


def _collate(items: list[tuple[int, Array | str]], size: tuple[int, int]) -> tuple[Pictures, list[tuple[int, str]]]:
    images = [BLANK if isinstance(image, str) else image for _, image in items]
    sizes = torch.tensor([image.shape[:2] for image in images])
    height, width = torch.maximum(sizes.amax(0), torch.tensor(size)).tolist()
    pixels = torch.zeros(len(items), height, width, 3, dtype=torch.uint8)
    for padded, image in zip(pixels, images, strict=True):
        padded[: image.shape[0], : image.shape[1]] = torch.from_numpy(image)
    good = torch.tensor([not isinstance(image, str) for _, image in items])
    return Pictures(pixels, sizes, good), [(index, why) for index, why in items if isinstance(why, str)]


class HeldImages:
    """Images that are decoded once, and kept on each device that uses them.

    Args:
        count: decode the images 0, 1, ..., count - 1.
        size: height and width of the largest.
    """

    def __init__(self, decode: Decode, count: int, report: Report, *, workers: int, size: tuple[int, int]) -> None:
        self.pixels = torch.zeros(count, *size, 3, dtype=torch.uint8)
        self.sizes, self.good = torch.zeros(count, 2, dtype=torch.int64), np.zeros(count, dtype=bool)
        groups = np.array_split(np.arange(count), -(-count // 500))
        decoded = read(decode, groups, report, workers=workers, device=torch.device("cpu"), size=size)
        for group, (pixels, sizes, good) in zip(groups, decoded, strict=True):
            self.pixels[group], self.sizes[group], self.good[group] = pixels, sizes, good.numpy()
        self._on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def batches(self, batches: Sequence[Array], device: torch.device) -> Iterator[Pictures]:
        if device not in self._on:
            self._on[device] = self.pixels.to(device), self.sizes.to(device)
        pixels, sizes = self._on[device]
        order = torch.from_numpy(np.concatenate(batches))
        if device.type == "cuda":  # copying pinned memory does not make the GPU wait
            order = order.pin_memory()
        order = order.to(device, non_blocking=True)
        for batch, indices in zip(batches, torch.split(order, [len(batch) for batch in batches]), strict=True):
            yield Pictures(pixels[indices], sizes[indices], torch.from_numpy(self.good[batch]))
