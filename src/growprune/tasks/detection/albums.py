"""Reads pictures: decoded once and kept in memory, or read when they are needed if they are too many."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from growprune.tasks.bad_records import BadRecords, check_split
from growprune.tasks.detection.coco import Scene, load, targets
from growprune.tasks.image_loading import decoding, pillow, to_rgb, unreadable

MAX_HELD_BYTES = 10**9
"""If the padded pictures of a split take less, they are kept in memory, on the device that uses them."""
MISSING = "there is no such file"
LONGEST_SIDE = 640
"""Larger pictures are resized when they are read. COCO has none, and the model sees 300 pixels."""


Indices = npt.NDArray[np.int64]


class Pictures(NamedTuple):
    """Some pictures in one padded tensor, each in the upper left corner."""

    pixels: Tensor
    """uint8, (B, 3, H, W)"""
    sizes: Tensor
    """Height and width of each, (B, 2)."""
    good: Tensor
    """False for pictures that cannot be read, (B), on the CPU."""


class Album:
    """The scenes of a split and their pictures.

    Args:
        workers: processes that read the pictures when they are needed.
        bad: counts pictures that cannot be read.
        decoded: all pictures, if they are kept in memory.
    """

    def __init__(self, scenes: Sequence[Scene], workers: int, bad: BadRecords, decoded: Pictures | None = None) -> None:
        self.scenes, self._workers, self._bad = scenes, workers, bad
        self._decoded = {} if decoded is None else {torch.device("cpu"): decoded}

    @functools.cached_property
    def targets(self) -> tuple[Tensor, Tensor]:
        return targets(self.scenes)

    def pictures(
        self, batches: Sequence[Indices], device: torch.device, replica: tuple[int, int] = (0, 1)
    ) -> Iterator[Pictures]:
        """Yield the pictures of each batch of scenes, given by their positions.

        Args:
            replica: its index and their number. Pictures that other replicas use may be blank.
        """
        if self._decoded:
            if device not in self._decoded:
                pixels, sizes, good = self._decoded[torch.device("cpu")]
                self._decoded[device] = Pictures(pixels.to(device), sizes.to(device), good)
            pixels, sizes, good = self._decoded[device]
            for batch in batches:
                here = torch.from_numpy(batch)
                there = here.to(device, non_blocking=True)
                yield Pictures(pixels[there], sizes[there], good[here])
            return
        index, count = replica
        wanted = [[(n, place % count == index) for place, n in enumerate(batch.tolist())] for batch in batches]
        loader = decoding(_Decoder(self.scenes), wanted, _collate, workers=self._workers, device=device)
        for (pixels, sizes, good), errors in loader:
            for name, error in errors:
                self._bad.skip(name, error)
            yield Pictures(pixels.to(device, non_blocking=True), sizes.to(device, non_blocking=True), good)


@functools.cache
def album(data: str, split: str, *, num_classes: int, num_validation: int, workers: int) -> Album:
    """Return the album of a split. Pictures that cannot be read are skipped with a warning."""
    scenes = load(data, num_classes=num_classes, num_validation=num_validation)[split]
    bad = BadRecords(f"{data}: {split} images", len(scenes), always=10 if split == "train" else 1)
    shown = [_shown(scene.width, scene.height) for scene in scenes]
    widest, highest = (max(sides) for sides in zip(*shown, strict=True))
    if 3 * widest * highest * len(scenes) >= MAX_HELD_BYTES:
        if split != "train":  # raise now if pictures are missing, not at the end
            for scene in scenes:
                if not scene.path.exists():
                    bad.skip(scene.name, MISSING)
        return Album(scenes, workers, bad)
    kept, decoded = [], []
    for scene in scenes:
        picture = decode(scene)
        if isinstance(picture, str):
            bad.skip(scene.name, picture)
        else:
            kept.append(scene)
            decoded.append(picture)
    check_split(len(kept), data, split)
    return Album(kept, workers, bad, decoded=_lay_out(decoded))


BLANK = torch.zeros(3, 1, 1, dtype=torch.uint8)
"""Placeholder for a picture that cannot be read or is not used."""


class _Decoder(Dataset[tuple[str, Tensor | str]]):
    def __init__(self, scenes: Sequence[Scene]) -> None:
        self.scenes = scenes

    def __getitem__(self, wanted: tuple[int, bool]) -> tuple[str, Tensor | str]:
        index, is_wanted = wanted
        scene = self.scenes[index]
        return scene.name, decode(scene) if is_wanted else BLANK


def _collate(items: list[tuple[str, Tensor | str]]) -> tuple[Pictures, list[tuple[str, str]]]:
    errors = [(name, item) for name, item in items if isinstance(item, str)]
    pixels, sizes, _ = _lay_out([BLANK if isinstance(item, str) else item for _, item in items])
    good = torch.tensor([not isinstance(item, str) for _, item in items])
    return Pictures(pixels, sizes, good), errors


def _lay_out(pictures: Sequence[Tensor]) -> Pictures:
    sizes = torch.tensor([picture.shape[1:] for picture in pictures])
    highest, widest = sizes.amax(0).tolist()
    pixels = torch.zeros(len(pictures), 3, highest, widest, dtype=torch.uint8)
    for index, picture in enumerate(pictures):
        pixels[index, :, : picture.shape[1], : picture.shape[2]] = picture
    return Pictures(pixels, sizes, torch.ones(len(pictures), dtype=torch.bool))


def decode(scene: Scene) -> Tensor | str:
    """Return a picture as (3, height, width), or the reason why it cannot be read."""
    image_module = pillow("detection")
    try:
        with image_module.open(scene.path) as image:
            if image.size != (scene.width, scene.height):
                said = f"{scene.width} x {scene.height}"
                return f"it has {image.size[0]} x {image.size[1]} pixels, and its annotation says {said}"
            image.draft("RGB", (LONGEST_SIDE, LONGEST_SIDE))  # lets JPEG skip detail that resizing would remove
            pixels = to_rgb(image)
    except unreadable(image_module) as error:
        return f"it cannot be decoded ({error})" if scene.path.exists() else MISSING
    size = _shown(scene.width, scene.height)
    if pixels.size != size:
        pixels = pixels.resize(size, image_module.Resampling.BILINEAR)
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1)


def _shown(width: int, height: int) -> tuple[int, int]:
    """Return width and height of a picture after resizing."""
    scale = min(1.0, LONGEST_SIDE / max(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))
