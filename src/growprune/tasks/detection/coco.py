"""Data in the format of COCO: annotations, splits, pictures, and the twelve metrics, computed by pycocotools.

Pictures are decoded once and kept in memory, or read when they are needed if they are too many.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from growprune.errors import GrowpruneError, need
from growprune.tasks.bad_records import BadRecords, check_split, cut_validation, find
from growprune.tasks.images import BILINEAR, Array, HeldImages, Pictures, UnreadableImage, opened, read, to_rgb

LAYOUT = (
    "DIR/annotations/{train,val}.json, and test.json if there is a labelled test split, with the images in "
    "DIR/{train,val,test}/; or COCO 2017 as it is: DIR/annotations/instances_{train,val}2017.json and "
    "DIR/{train,val}2017/"
)


@dataclass(frozen=True, eq=False)
class Scene:
    """An image and its annotations."""

    image_id: int
    path: Path
    width: int
    height: int
    boxes: npt.NDArray[np.float64]
    """x, y, width, height in pixels, as in the file, (n, 4)."""
    labels: npt.NDArray[np.int64]
    """Labels from 1, in the order of the category ids, (n)."""
    areas: npt.NDArray[np.float64]
    crowds: npt.NDArray[np.bool_]
    """True for a region of many objects, which is ignored in training and in evaluation."""


@functools.cache
def load(data: str, *, num_classes: int, num_validation: int) -> dict[str, tuple[Scene, ...]]:
    """Load the splits train, validation and test.

    A data set with a labelled test split has all three. Otherwise, as with COCO, `val` is the test split and
    `num_validation` images of `train` are the validation split, the same ones for every run.
    """
    names = ("train", "val", "test")
    if (Path(data) / "annotations/instances_train2017.json").exists():
        files = {name: (f"annotations/instances_{name}2017.json", f"{name}2017") for name in names}
    else:
        files = {name: (f"annotations/{name}.json", name) for name in names}
    if not (Path(data) / files["test"][0]).exists():
        del files["test"]
    splits: dict[str, tuple[Scene, ...]] = {}
    first: dict[int, str] = {}
    for name, (file, folder) in files.items():
        source = find(data, file, layout=LAYOUT)
        categories, splits[name] = read_annotations(source, find(data, folder, layout=LAYOUT))
        check_split(len(splits[name]), source, name)
        if len(categories) != num_classes:
            raise GrowpruneError(
                f"{source} has {len(categories)} categories, not {num_classes}. Set task.num_classes={len(categories)}"
            )
        first = first or categories
        if categories != first:
            identity, text = min(set(categories.items()) ^ set(first.items()))
            raise GrowpruneError(
                f"the categories of {source} differ from those of the training split: only one has {text!r} with id "
                f"{identity}"
            )
        if not any((~scene.crowds).any() for scene in splits[name]):
            raise GrowpruneError(f"{source} has no boxes of single objects in the {name} split. Add annotations")
    if "test" in splits:
        return {"train": splits["train"], "validation": splits["val"], "test": splits["test"]}
    cut = cut_validation(len(splits["train"]), num_validation, f"{data}, which has no labelled test split")
    train, validation = (tuple(splits["train"][index] for index in indices) for indices in cut)
    return {"train": train, "validation": validation, "test": splits["val"]}


def read_annotations(source: Path, folder: Path) -> tuple[dict[int, str], tuple[Scene, ...]]:
    """Read the names of categories by id, and the scenes of an annotation file, whose images are in `folder`.

    Annotations that cannot be used are skipped with a warning, as COCO has some. Images and categories must be valid.
    """
    try:
        content: Any = json.loads(source.read_bytes())
    except (ValueError, RecursionError) as error:  # for a number that is too large, or lists nested too deeply
        raise GrowpruneError(f"{source} is not JSON: {error}. Download or create it again") from error
    for name in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(name), list):
            raise GrowpruneError(f"{source} has no list {name!r}. A COCO file has images, annotations and categories")
    images, categories = (_by_id(content[name], name, source) for name in ("images", "categories"))
    for identity, image in images.items():
        if not isinstance(file := image.get("file_name"), str):
            raise GrowpruneError(f"{source}: image {identity}: file_name must be a string, got {file!r}")
        if min(_whole(image, side, f"{source}: image {identity}: ") for side in ("width", "height")) < 1:
            raise GrowpruneError(f"{source}: image {identity} has {image['width']} x {image['height']} pixels")
    labels = {identity: label for label, identity in enumerate(sorted(categories), start=1)}  # without gaps
    bad = BadRecords(source, len(content["images"]) + len(content["annotations"]))
    rows: dict[int, list[tuple[float, ...]]] = {identity: [] for identity in images}
    for number, record in enumerate(content["annotations"]):
        try:
            identity, category = _whole(record, "image_id"), _whole(record, "category_id")
            if identity not in images:
                raise GrowpruneError(f"no image has id {identity}")
            if category not in labels:
                raise GrowpruneError(f"no category has id {category}")
            box, crowd, image = record.get("bbox"), record.get("iscrowd") or 0, images[identity]
            if not isinstance(box, list) or len(box) != 4 or not all(_is_number(value) for value in box):
                raise GrowpruneError(f"bbox must be four numbers x, y, width, height, got {box!r}")
            x, y, width, height = box
            if width <= 0 or height <= 0:
                raise GrowpruneError(f"its box {box} has no size")
            if x >= image["width"] or y >= image["height"] or x + width <= 0 or y + height <= 0:
                size = f"{image['width']} x {image['height']} pixels"
                raise GrowpruneError(f"its box {box} is outside the image of {size}")
            if crowd not in (0, 1):
                raise GrowpruneError(f"iscrowd must be 0 or 1, got {crowd!r}")
            area = record.get("area")
            rows[identity].append((*box, labels[category], area if _is_number(area) else width * height, crowd))
        except ValueError as error:
            name = record.get("id", "none") if isinstance(record, dict) else "none"
            bad.skip(f"annotation number {number} (id {name})", error)
    scenes = []
    for identity, image in images.items():
        table = np.asarray(rows[identity], dtype=np.float64).reshape(-1, 7)
        columns = table[:, :4], table[:, 4].astype(np.int64), table[:, 5], table[:, 6] > 0
        scenes.append(Scene(identity, folder / image["file_name"], image["width"], image["height"], *columns))
    return {identity: str(categories[identity].get("name", "")) for identity in labels}, tuple(scenes)


def _by_id(records: list[Any], name: str, source: Path) -> dict[int, dict[str, Any]]:
    found = {_whole(record, "id", f"{source}: {name}[{n}]: "): record for n, record in enumerate(records)}
    if len(found) < len(records):
        raise GrowpruneError(f"{source}: two {name} have the same id. Give each its own")
    return found


def _whole(record: Any, field: str, where: str = "") -> int:
    value = record.get(field) if isinstance(record, dict) else None
    if not isinstance(value, int) or isinstance(value, bool):
        raise GrowpruneError(f"{where}{field} must be an integer, got {value!r}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9


NAMES = (
    *("map", "map50", "map75", "map_small", "map_medium", "map_large"),
    *("mar1", "mar10", "mar100", "mar_small", "mar_medium", "mar_large"),
)


def coco_numbers(
    scenes: Sequence[Scene], found: Sequence[npt.NDArray[np.float64]], *, num_classes: int
) -> dict[str, float]:
    """Compute average precisions and recalls, in percent. Sizes without objects, where COCO returns -1, are left out.

    Args:
        found: for each scene (x, y, width, height in pixels, score, label) of each detection, (n, 6).
    """
    images = [{"id": scene.image_id} for scene in scenes]
    truth = [
        {"image_id": scene.image_id, "bbox": box, "category_id": label, "area": area, "iscrowd": int(crowd)}
        for scene in scenes
        for box, label, area, crowd in zip(
            *(column.tolist() for column in (scene.boxes, scene.labels, scene.areas, scene.crowds)), strict=True
        )
    ]
    claims = [
        {"image_id": scene.image_id, "bbox": box, "score": score, "category_id": int(label), "area": box[2] * box[3]}
        for scene, rows in zip(scenes, found, strict=True)
        for *box, score, label in rows.tolist()
    ]
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
        evaluation = cocoeval()(*(_index(images, rows, num_classes) for rows in (truth, claims)), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    numbers = {name: float(value) for name, value in zip(NAMES, evaluation.stats, strict=True)}
    return {name: 100 * max(0.0, value) for name, value in numbers.items() if value >= 0 or "_" not in name}


def cocoeval() -> Any:
    return need("pycocotools.cocoeval", "detection", "scoring detections needs pycocotools").COCOeval


def _index(images: list[dict[str, Any]], rows: list[dict[str, Any]], num_classes: int) -> Any:
    """Return a pycocotools index of these rows. Unlike its loadRes, it accepts an empty list."""
    from pycocotools.coco import COCO

    index = COCO()
    categories = [{"id": label} for label in range(1, num_classes + 1)]
    annotations = [{"id": number, "iscrowd": 0, **row} for number, row in enumerate(rows, start=1)]
    index.dataset = {"images": images, "categories": categories, "annotations": annotations}
    index.createIndex()
    return index


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
        """Objects of the scenes, without crowds: corners as fractions of the image (N, M, 4), and labels (N, M)."""
        wanted = [~scene.crowds for scene in self.scenes]
        most = max(1, max((int(want.sum()) for want in wanted), default=0))
        boxes, labels = torch.zeros(len(self.scenes), most, 4), torch.zeros(len(self.scenes), most, dtype=torch.int64)
        for index, (scene, want) in enumerate(zip(self.scenes, wanted, strict=True)):
            start, size = np.split(scene.boxes[want], 2, axis=1)
            corners = np.hstack((start, start + size)) / (scene.width, scene.height, scene.width, scene.height)
            boxes[index, : len(size)] = torch.from_numpy(corners.clip(0, 1))
            labels[index, : len(size)] = torch.from_numpy(scene.labels[want])
        return boxes, labels

    def pictures(
        self, batches: Sequence[Array], device: torch.device, used: Callable[[int], Array] | None = None
    ) -> Iterator[Pictures]:
        """Yield the pictures of each batch of scenes, given by their positions; see `images.read`."""
        if self._held is not None:
            return self._held.batches([self._kept[batch] for batch in batches], device)
        return read(self._decode, batches, self._report, workers=self._workers, device=device, used=used)

    def _decode(self, index: int) -> Array:
        """Return a picture as (height, width, 3)."""
        scene = self.scenes[index]
        if not scene.path.exists():
            raise UnreadableImage(MISSING)
        with opened(scene.path, "detection") as image:
            if image.size != (scene.width, scene.height):
                given, said = f"{image.size[0]} x {image.size[1]}", f"{scene.width} x {scene.height}"
                raise UnreadableImage(f"it has {given} pixels, and its annotation says {said}")
            image.draft("RGB", (LONGEST_SIDE, LONGEST_SIDE))  # lets JPEG skip detail that resizing would remove
            pixels = to_rgb(image)
        height, width = _shown(scene)
        return np.array(pixels if pixels.size == (width, height) else pixels.resize((width, height), BILINEAR))

    def _report(self, index: int, why: str) -> None:
        scene = self.scenes[index]
        self._bad.skip(f"{scene.path.name} (id {scene.image_id})", why)


@functools.cache
def album(data: str, split: str, *, num_classes: int, num_validation: int, workers: int) -> Album:
    return Album(data, split, load(data, num_classes=num_classes, num_validation=num_validation)[split], workers)


def _shown(scene: Scene) -> tuple[int, int]:
    """Return height and width of a picture after resizing."""
    scale = min(1.0, LONGEST_SIDE / max(scene.width, scene.height))
    return max(1, round(scene.height * scale)), max(1, round(scene.width * scale))
