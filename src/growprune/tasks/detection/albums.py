"""The pictures of scenes: decoded once and kept in memory, or read when they are needed if they are too many."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from growprune.tasks.bad_records import BadRecords, check_split
from growprune.tasks.detection.coco import Scene, load, targets
from growprune.tasks.images import BILINEAR, Array, HeldImages, Pictures, UnreadableImage, opened, read, to_rgb

MAX_HELD_BYTES = 10**9
"""If the padded pictures of a split take less, they are kept in memory, on the device that uses them."""
MISSING = "there is no such file"
LONGEST_SIDE = 640
"""Larger pictures are resized when they are read. COCO has none, and the model sees 300 pixels."""


class Album:
    """The scenes of a split that can be read, and their pictures. Those that cannot are skipped with a warning."""

    def __init__(self, data: str, split: str, scenes: Sequence[Scene], workers: int) -> None:
        self.scenes, self._workers = list(scenes), workers
        self._bad = BadRecords(f"{data}: {split} images", len(scenes), always=10 if split == "train" else 1)
        self._held: HeldImages | None = None
        self._kept = np.arange(len(scenes))
        highest, widest = (max(sides) for sides in zip(*map(_shown, scenes), strict=True))
        if 3 * widest * highest * len(scenes) < MAX_HELD_BYTES:
            size = highest, widest
            self._held = HeldImages(self._decode, len(scenes), self._report, workers=0, size=size)
            self._kept = np.flatnonzero(self._held.good)
            check_split(len(self._kept), data, split)
            self.scenes = [scenes[index] for index in self._kept.tolist()]
        elif split != "train":  # raise now if pictures are missing, not at the end
            for index, scene in enumerate(scenes):
                if not scene.path.exists():
                    self._report(index, MISSING)

    @functools.cached_property
    def targets(self) -> tuple[Tensor, Tensor]:
        return targets(self.scenes)

    def pictures(
        self, batches: Sequence[Array], device: torch.device, used: Callable[[int], Array] | None = None
    ) -> Iterator[Pictures]:
        """Yield the pictures of each batch of scenes, given by their positions; see `images.read`."""
        if self._held is not None:
            return self._held.batches([self._kept[batch] for batch in batches], device)
        return read(self._decode, batches, self._report, workers=self._workers, device=device, used=used)

    def _decode(self, index: int) -> Array:
        return decode(self.scenes[index])

    def _report(self, index: int, why: str) -> None:
        self._bad.skip(self.scenes[index].name, why)


@functools.cache
def album(data: str, split: str, *, num_classes: int, num_validation: int, workers: int) -> Album:
    """Return the album of a split."""
    return Album(data, split, load(data, num_classes=num_classes, num_validation=num_validation)[split], workers)


def decode(scene: Scene) -> Array:
    """Return a picture as (height, width, 3)."""
    if not scene.path.exists():
        raise UnreadableImage(MISSING)
    with opened(scene.path, "detection") as image:
        if image.size != (scene.width, scene.height):
            said = f"{scene.width} x {scene.height}"
            raise UnreadableImage(f"it has {image.size[0]} x {image.size[1]} pixels, and its annotation says {said}")
        image.draft("RGB", (LONGEST_SIDE, LONGEST_SIDE))  # lets JPEG skip detail that resizing would remove
        pixels = to_rgb(image)
    height, width = _shown(scene)
    return np.array(pixels if pixels.size == (width, height) else pixels.resize((width, height), BILINEAR))


def _shown(scene: Scene) -> tuple[int, int]:
    """Return height and width of a picture after resizing."""
    scale = min(1.0, LONGEST_SIDE / max(scene.width, scene.height))
    return max(1, round(scene.height * scale)), max(1, round(scene.width * scale))
