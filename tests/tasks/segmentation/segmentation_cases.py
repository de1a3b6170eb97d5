"""Shapes and tasks for the tests of segmentation."""

import json
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from paths import SHARED
from torch import Tensor, nn

from growprune.tasks.segmentation import PartSegmentation, shapenet
from growprune.tasks.segmentation.shapenet import CATEGORY_OF_PART, SYNSETS

CPU = torch.device("cpu")
AIRPLANE, BAG, MUG = "02691156", "02773838", "03797390"
SUBSET = SHARED / "shapenet_part_subset.zip"


def random_clouds(num_clouds: int, num_points: int, seed: int = 0, width: int = 3) -> Tensor:
    return torch.rand(num_clouds, num_points, width, generator=torch.Generator().manual_seed(seed))


clouds = st.builds(random_clouds, st.integers(1, 3), st.integers(8, 40), st.integers(0, 10**6))


def small(**settings: object) -> PartSegmentation:
    tiny = PartSegmentation(num_points=32, batch_size=2, width=1 / 16, detail=1 / 16)
    return replace(tiny, **settings)  # type: ignore[arg-type]


def small_model(**settings: object) -> nn.Module:
    torch.manual_seed(0)
    return small(**settings).build_model()


def shape_text(synset: str, num_points: int, seed: int) -> str:
    """Points of a shape whose labels can be read off the first number of the normal."""
    generator = np.random.default_rng(seed)
    parts = np.flatnonzero(np.array(CATEGORY_OF_PART) == list(SYNSETS).index(synset))
    numbers = generator.normal(size=(num_points, 6))
    labels = generator.choice(parts, num_points)
    numbers[:, 3] = labels
    return "".join(" ".join(f"{x:.6f}" for x in (*row, n)) + "\n" for row, n in zip(numbers, labels, strict=True))


COUNTS = {"train": 5, "val": 2, "test": 3}


@pytest.fixture(autouse=True)
def fresh_caches() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    """As if the process began anew."""
    for function in (shapenet.load, shapenet.shapes_on, shapenet.evaluation_set):
        function.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A benchmark of three categories with shapes of 20 to 60 points."""
    folder = tmp_path / "data" / shapenet.NAME
    (folder / "train_test_split").mkdir(parents=True)
    (folder / shapenet.INDEX).write_text(f"Airplane\t{AIRPLANE}\nBag\t{BAG}\nMug\t{MUG}\n")
    number = 0
    for split, count in COUNTS.items():
        entries = []
        for synset in (AIRPLANE, MUG, BAG)[: 3 if split != "val" else 1]:
            (folder / synset).mkdir(exist_ok=True)
            for _ in range(count):
                number += 1
                (folder / synset / f"shape{number}.txt").write_text(shape_text(synset, 20 + 3 * number % 41, number))
                entries.append(f"shape_data/{synset}/shape{number}")
        (folder / "train_test_split" / f"shuffled_{split}_file_list.json").write_text(json.dumps(entries))
    return folder


def zipped(folder: Path, path: Path, *, top: str = shapenet.NAME + "/") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*.*")):
            archive.write(file, top + str(file.relative_to(folder)))
    return path


GOOD = "0 0 0 0 0 1 36\n"
