"""The ShapeNet part benchmark: its files, drawing points of its shapes on the device, and its metric.

synsetoffset2category.txt                                 one line per category: its name, a tab, its synset
<synset>/<id>.txt                                         one line per point: x y z nx ny nz label
train_test_split/shuffled_{train,val,test}_file_list.json ["shape_data/<synset>/<id>", ...]

The shapes stay on the device. Training draws new points of them in every epoch; evaluation always uses the same points.
"""

from __future__ import annotations

import functools
import json
import zipfile
import zlib
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.tasks.bad_records import BadRecords, check_split, find

SYNSETS = {
    "02691156": ("Airplane", 4),
    "02773838": ("Bag", 2),
    "02954340": ("Cap", 2),
    "02958343": ("Car", 4),
    "03001627": ("Chair", 4),
    "03261776": ("Earphone", 3),
    "03467517": ("Guitar", 3),
    "03624134": ("Knife", 2),
    "03636649": ("Lamp", 4),
    "03642806": ("Laptop", 2),
    "03790512": ("Motorbike", 6),
    "03797390": ("Mug", 2),
    "03948459": ("Pistol", 3),
    "04099429": ("Rocket", 3),
    "04225987": ("Skateboard", 3),
    "04379243": ("Table", 3),
}
"""Name and number of parts of each category, by folder. Parts are numbered consecutively in this order."""

NUM_CATEGORIES = len(SYNSETS)
CATEGORY_OF_PART = [category for category, (_, parts) in enumerate(SYNSETS.values()) for _ in range(parts)]
NUM_PARTS = len(CATEGORY_OF_PART)

NAME = "shapenetcore_partanno_segmentation_benchmark_v0_normal"
INDEX = "synsetoffset2category.txt"
LAYOUT = f"the folder {NAME} with {INDEX}, <synset>/<id>.txt and train_test_split/, or its parent, or a zip file of it"
SPLITS = {"train": "train", "validation": "val", "test": "test"}

Batch = tuple[Tensor, Tensor, Tensor]
"""Points (B, N, 6), categories (B,), and the part of each point (B, N)."""
Floats = NDArray[np.float32]
Root = Path | zipfile.Path
UNREADABLE = (OSError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error)
"""Errors of a file that is missing, unreadable, or damaged in its zip file."""


@dataclass(frozen=True)
class Shapes:
    """The shapes of a split, with the points of all shapes in one tensor."""

    points: Tensor
    """(points of all shapes, 6): xyz, where each shape is scaled into the unit sphere, and normals."""
    labels: Tensor
    counts: Tensor
    """Number of points of each shape."""
    categories: Tensor

    @functools.cached_property
    def starts(self) -> Tensor:
        """Index of the first point of each shape."""
        return self.counts.cumsum(0) - self.counts

    @functools.cached_property
    def longest(self) -> int:
        """The largest count, cached so that the host does not wait for the device."""
        return int(self.counts.max())

    def __len__(self) -> int:
        return len(self.counts)

    def draw(self, indices: Tensor, num_points: int, generator: torch.Generator) -> Batch:
        """Draw points of some shapes in random order. If a shape has too few points, they repeat."""
        device = indices.device
        counts = self.counts[indices].unsqueeze(1)
        keys = torch.rand(len(indices), self.longest, generator=generator, device=device)
        keys.masked_fill_(torch.arange(self.longest, device=device) >= counts, 2)  # padding comes last
        order = keys.argsort(dim=1, stable=True)
        drawn = order.gather(1, torch.arange(num_points, device=device) % counts)
        rows = self.starts[indices].unsqueeze(1) + drawn
        return self.points[rows], self.categories[indices], self.labels[rows].long()


@functools.cache
def load(data: str) -> dict[str, Shapes]:
    """Read the three splits, once per process."""
    source = find(data, ".", layout=LAYOUT)
    try:
        root: Root = source if source.is_dir() else zipfile.Path(source)
    except (zipfile.BadZipFile, OSError) as error:
        raise GrowpruneError(f"{source} is not a folder or a valid zip file ({error}). Expected {LAYOUT}") from error
    root = root / NAME if (root / NAME / INDEX).exists() else root
    if not (root / INDEX).exists():
        raise GrowpruneError(f"{data} has no {INDEX}. Expected {LAYOUT}")
    entries = {split: _read_list(data, name, root) for split, name in SPLITS.items()}
    bad = BadRecords(data, len(entries["train"]))
    shapes = {}
    for split in SPLITS:
        read: list[tuple[Floats, int]] = []
        for entry in entries[split]:
            try:
                read.append(_read_shape(entry, root))
            except ValueError as error:
                if split != "train":
                    raise GrowpruneError(
                        f"{data}: {entry}: {error}. Shapes of the {split} split are never skipped. Repair it"
                    ) from error
                bad.skip(entry, error)
        check_split(len(read), data, split)
        shapes[split] = join(read)
    return shapes


def _read_list(data: str, name: str, root: Root) -> list[str]:
    relative = f"train_test_split/shuffled_{name}_file_list.json"
    try:
        entries = json.loads((root / relative).read_bytes())
    except FileNotFoundError as error:
        raise GrowpruneError(f"{data} has no {relative}. Expected {LAYOUT}") from error
    except UNREADABLE as error:  # RecursionError is a RuntimeError
        raise GrowpruneError(f"{data}: cannot read {relative} ({error}). Download it again") from error
    except ValueError as error:
        raise GrowpruneError(f"{data}: {relative} is not JSON ({error}). Expected a list of shapes") from error
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise GrowpruneError(f"{data}: {relative} must be a list such as ['shape_data/<synset>/<id>', ...]")
    return entries


def _read_shape(entry: str, root: Root) -> tuple[Floats, int]:
    """Read the points of a shape as a matrix, and its category."""
    file = entry.removeprefix("shape_data/") + ".txt"
    synset, *rest = file.split("/")
    if len(rest) != 1:
        raise GrowpruneError("it must be shape_data/<synset>/<id>")
    if synset not in SYNSETS:
        raise GrowpruneError(f"its category {synset!r} must be one of {', '.join(SYNSETS)}")
    try:
        text = (root / file).read_bytes().decode("latin-1")  # never fails; words that are not numbers are found later
    except FileNotFoundError as error:
        raise GrowpruneError(f"{file} does not exist") from error
    except UNREADABLE as error:
        raise GrowpruneError(f"cannot read {file} ({error})") from error
    if not text.strip():
        raise GrowpruneError("the shape has no points")
    matrix = np.loadtxt(text.splitlines(), dtype=np.float32, comments=None, ndmin=2)  # its errors name the line
    if matrix.shape[1] != 7:
        raise GrowpruneError(f"its lines have {matrix.shape[1]} numbers, not the 7 of x y z nx ny nz label")
    category = list(SYNSETS).index(synset)
    wrong = ~np.isfinite(matrix).all(1)
    if wrong.any():
        raise GrowpruneError(f"point {wrong.argmax() + 1} has a non-finite value")
    parts = [part for part, owner in enumerate(CATEGORY_OF_PART) if owner == category]
    wrong = ~np.isin(matrix[:, 6], parts)
    if wrong.any():
        raise GrowpruneError(
            f"labels of category {SYNSETS[synset][0]} must be {parts[0]} to {parts[-1]}, "
            f"got {matrix[wrong.argmax(), 6]:g} for point {wrong.argmax() + 1}"
        )
    return matrix, category


def join(shapes: list[tuple[Floats, int]]) -> Shapes:
    """Join the points of shapes, each a matrix with a category, and scale each into the unit sphere."""
    everything = np.concatenate([matrix for matrix, _ in shapes])
    counts = np.array([len(matrix) for matrix, _ in shapes], np.int64)
    points, labels = everything[:, :6].copy(), everything[:, 6].astype(np.uint8)
    for xyz in np.split(points[:, :3], counts.cumsum()[:-1]):
        centred = xyz.astype(np.float64) - xyz.mean(0, dtype=np.float64)
        xyz[:] = centred / (np.linalg.norm(centred, axis=1).max() or 1)  # in `points`
    categories = np.array([category for _, category in shapes], np.int64)
    return Shapes(*map(torch.from_numpy, (points, labels, counts, categories)))


@functools.cache
def shapes_on(data: str, split: str, device: torch.device) -> Shapes:
    """Copy the shapes of a split to a device, once."""
    shapes = load(data)[split]
    return Shapes(*(getattr(shapes, field.name).to(device) for field in fields(Shapes)))


@functools.cache
def evaluation_set(data: str, split: str, num_points: int, device: torch.device) -> Batch:
    """Return all shapes of a split. Their points are drawn once, on the CPU, so that all devices use the same."""
    shapes = load(data)[split]
    drawn = shapes.draw(torch.arange(len(shapes)), num_points, torch.Generator().manual_seed(0))
    points, categories, labels = (tensor.to(device) for tensor in drawn)
    return points, categories, labels


def parts_of(categories: Tensor) -> Tensor:
    """Return a mask of the parts that belong to the category of each shape."""
    return torch.tensor(CATEGORY_OF_PART, device=categories.device) == categories[:, None]  # (B, parts)


def predict(logits: Tensor, categories: Tensor) -> Tensor:
    """Return the most likely part of each point, among the parts of the shape's category."""
    allowed = parts_of(categories).unsqueeze(1)
    return logits.masked_fill(~allowed, -torch.inf).argmax(2)  # (B, N)


def shape_ious(predicted: Tensor, labels: Tensor, categories: Tensor) -> Tensor:
    """Return the mean IoU of each shape over the parts of its category; 1 for parts neither predicted nor true."""
    parts = torch.arange(NUM_PARTS, device=labels.device)
    is_predicted, is_true = predicted.unsqueeze(2) == parts, labels.unsqueeze(2) == parts  # (B, N, parts)
    intersection, union = (is_predicted & is_true).sum(1), (is_predicted | is_true).sum(1)
    ious = torch.where(union == 0, 1.0, intersection / union.clamp(min=1))
    own = parts_of(categories)
    return (ious * own).sum(1) / own.sum(1)  # (B,)


def mean_ious(ious: Tensor, categories: Tensor) -> tuple[float, float]:
    """Return the mean IoU over shapes, and the mean over categories of their mean over shapes."""
    ious = ious.to(torch.float64)
    by_category = [ious[categories == category].mean() for category in torch.unique(categories)]
    return float(ious.mean()), float(torch.stack(by_category).mean())
