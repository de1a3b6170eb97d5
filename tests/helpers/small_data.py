"""Data for the tiny recipes, a few examples each, in the formats of the real sets."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np


def classification(path: Path) -> Path:
    """A packed .npz of two classes, one dark, one bright."""
    from PIL import Image

    random = np.random.default_rng(0)
    files = []
    for number in range(64):
        pixels = random.integers(0, 100, (16, 16, 3), dtype=np.uint8) + 120 * (number % 2)
        file = io.BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).save(file, "JPEG")
        files.append(np.frombuffer(file.getvalue(), dtype=np.uint8))
    offsets = np.cumsum([0, *map(len, files)]).astype(np.int64)
    labels, split = np.arange(64, dtype=np.uint8) % 2, (np.arange(64) >= 48).astype(np.uint8)
    arrays: dict[str, Any] = {"data": np.concatenate(files), "offsets": offsets, "labels": labels, "split": split}
    np.savez(path / "images.npz", classes=np.array(["dark", "bright"]), **arrays)
    return path / "images.npz"


def detection(path: Path) -> Path:
    """COCO's files, with one bright square in each image."""
    from PIL import Image

    random = np.random.default_rng(0)
    categories = [{"id": number, "name": name} for number, name in enumerate(("RBC", "WBC", "Platelets"), 1)]
    (path / "annotations").mkdir()
    for split, count in {"train": 8, "val": 2, "test": 2}.items():
        (path / split).mkdir()
        images, annotations = [], []
        for number in range(count):
            x, y = (int(v) for v in random.integers(0, 40, 2))
            pixels = random.integers(0, 80, (80, 100, 3), dtype=np.uint8)
            pixels[y : y + 30, x : x + 30] = 230
            Image.fromarray(pixels).save(path / split / f"{number}.jpg")
            images.append({"id": number, "file_name": f"{number}.jpg", "width": 100, "height": 80})
            box = {"image_id": number, "category_id": 1 + number % 3, "bbox": [x, y, 30, 30], "area": 900, "iscrowd": 0}
            annotations.append({"id": number + 1, "segmentation": [], **box})
        content = {"images": images, "annotations": annotations, "categories": categories}
        (path / "annotations" / f"{split}.json").write_text(json.dumps(content))
    return path


def segmentation(path: Path) -> Path:
    """ShapeNet's folder: mugs whose two parts are two heights."""
    root = path / "shapenetcore_partanno_segmentation_benchmark_v0_normal"
    (root / "train_test_split").mkdir(parents=True)
    (root / "03797390").mkdir()
    (root / "synsetoffset2category.txt").write_text("Mug\t03797390\n")
    random = np.random.default_rng(0)
    for split, numbers in {"train": range(8), "val": range(8, 10), "test": range(10, 12)}.items():
        names = []
        for number in numbers:
            points = random.normal(size=(80, 6))
            rows = np.column_stack([points, 36 + (points[:, 1] > 0)])
            np.savetxt(root / "03797390" / f"s{number}.txt", rows, fmt=["%.6f"] * 6 + ["%d"])
            names.append(f"shape_data/03797390/s{number}")
        (root / "train_test_split" / f"shuffled_{split}_file_list.json").write_text(json.dumps(names))
    return path


def translation(path: Path) -> Path:
    """Parallel files: numbers in two languages."""
    words = {"en": "one two three four five six seven", "de": "eins zwei drei vier fünf sechs sieben"}
    random = np.random.default_rng(0)
    for split, count in {"train": 60, "val": 4, "test": 4}.items():
        lines = [random.integers(0, 7, random.integers(2, 8)) for _ in range(count)]
        for language, known in words.items():
            text = "\n".join(" ".join(known.split()[i] for i in line) for line in lines)
            (path / f"{split}.{language}").write_text(text + "\n", encoding="utf-8")
    return path


def language(path: Path) -> Path:
    """Sentences of a few words."""
    words = ["the", "cat", "saw", "a", "dog", "and", "ran", "to", "its", "house"]
    draws = np.random.default_rng(0).integers(0, len(words), (40, 5))
    (path / "text.txt").write_text("".join(" ".join(words[i] for i in line) + ".\n" for line in draws))
    return path / "text.txt"


MAKERS = {
    "classification": classification,
    "detection": detection,
    "segmentation": segmentation,
    "translation": translation,
}
"""Of the tasks of the paper, whose studies have every row of its tables."""

EVERY_MAKER = {**MAKERS, "language": language}
"""With the task that the paper does not have."""
