"""The twelve numbers of COCO, computed by its own code."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from growprune.errors import GrowpruneError
from growprune.tasks.detection.coco import Scene

NAMES = (
    *("map", "map50", "map75", "map_small", "map_medium", "map_large"),
    *("mar1", "mar10", "mar100", "mar_small", "mar_medium", "mar_large"),
)


def coco_numbers(
    scenes: Sequence[Scene], found: Sequence[npt.NDArray[np.float64]], *, num_classes: int
) -> dict[str, float]:
    """Average precisions and recalls, in percent, less those of sizes of which there are no objects (COCO says -1).

    Args:
        found: for each scene (x, y, width, height in pixels, score, label) of each detection, (n, 6).
    """
    images = [{"id": scene.image_id} for scene in scenes]
    truth = [row for scene in scenes for row in _truth(scene)]
    claims = [row for scene, rows in zip(scenes, found, strict=True) for row in _claims(rows, scene.image_id)]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints as it goes
        evaluation = cocoeval()(*(_index(images, rows, num_classes) for rows in (truth, claims)), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    numbers = {name: float(value) for name, value in zip(NAMES, evaluation.stats, strict=True)}
    return {name: 100 * max(0.0, value) for name, value in numbers.items() if value >= 0 or "_" not in name}


def cocoeval() -> Any:
    """The class that COCO is evaluated with."""
    try:
        from pycocotools.cocoeval import COCOeval
    except ImportError as error:
        raise GrowpruneError("detections are scored with pycocotools: pip install 'growprune[detection]'") from error
    return COCOeval


def _truth(scene: Scene) -> list[dict[str, Any]]:
    rows = zip(scene.boxes.tolist(), scene.labels.tolist(), scene.areas.tolist(), scene.crowds.tolist(), strict=True)
    return [
        {"image_id": scene.image_id, "bbox": box, "category_id": label, "area": area, "iscrowd": int(crowd)}
        for box, label, area, crowd in rows
    ]


def _claims(rows: npt.NDArray[np.float64], image_id: int) -> list[dict[str, Any]]:
    return [
        {"image_id": image_id, "bbox": box, "score": score, "category_id": int(label), "area": box[2] * box[3]}
        for *box, score, label in rows.tolist()
    ]


def _index(images: list[dict[str, Any]], rows: list[dict[str, Any]], num_classes: int) -> Any:
    """What COCO would make of a file with these rows; unlike its loadRes, for no rows too."""
    from pycocotools.coco import COCO

    index = COCO()
    categories = [{"id": label} for label in range(1, num_classes + 1)]
    annotations = [{"id": number, "iscrowd": 0, **row} for number, row in enumerate(rows, start=1)]
    index.dataset = {"images": images, "categories": categories, "annotations": annotations}
    index.createIndex()
    return index
