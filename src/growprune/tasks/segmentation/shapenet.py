"""Reads the ShapeNet part benchmark from a folder or a zip file, and draws points of its shapes on the device.

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
from growprune.tasks import cache
from growprune.tasks.bad_records import BadRecords, check_split, find
from growprune.tasks.segmentation.shapenet_parts import SYNSETS, parts_by_category

NAME = "shapenetcore_partanno_segmentation_benchmark_v0_normal"
INDEX = "synsetoffset2category.txt"
LAYOUT = f"the folder {NAME} with {INDEX}, <synset>/<id>.txt and train_test_split/, or its parent, or a zip file of it"
SPLITS = {"train": "train", "validation": "val", "test": "test"}
COLUMNS = ("x", "y", "z", "nx", "ny", "nz", "label")
VERSION = "2"
"""Version of the cache. Increase it when reading changes."""

Root = Path | zipfile.Path
UNREADABLE = (OSError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error)
"""Errors of a file that is missing, unreadable, or damaged in its zip file."""


@dataclass(frozen=True)
class Shapes:
    """The shapes of a split, with the points of all shapes in one array."""

    points: NDArray[np.float32]
    """(points of all shapes, 6): xyz, where each shape is scaled into the unit sphere, and normals."""
    labels: NDArray[np.uint8]
    counts: NDArray[np.int64]
    """Number of points of each shape."""
    categories: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.counts)


FIELDS = tuple(field.name for field in fields(Shapes))


def shapes_of(data: str, split: str) -> Shapes:
    """Return the shapes of a split. Raise if there are none."""
    shapes = load(data)[split]
    check_split(len(shapes), data, split)
    return shapes


@functools.cache
def load(data: str) -> dict[str, Shapes]:
    """Read the three splits, once per process, and from the cache if the files have not changed."""
    source = find(data, ".", layout=LAYOUT)
    if (source / NAME / INDEX).is_file():
        source = source / NAME
    root: Root = source
    if not source.is_dir():
        try:
            root = zipfile.Path(source)
        except (zipfile.BadZipFile, OSError) as error:
            raise GrowpruneError(
                f"{source} is not a folder or a valid zip file ({error}). Expected {LAYOUT}"
            ) from error
        root = root / NAME if (root / NAME / INDEX).exists() else root
    present = _read_index(data, root)
    lists = {split: _read_list(data, _list_name(split), root) for split in SPLITS}
    names = [INDEX, *map(_list_name, SPLITS), *(_file_name(entry) for split in SPLITS for entry in lists[split])]
    key = cache.key_of(source, names, VERSION)
    if arrays := cache.load_arrays(source, key):
        return {split: Shapes(*(arrays[f"{split}.{k}"] for k in FIELDS)) for split in SPLITS}  # type: ignore[arg-type]
    bad = BadRecords(data, len(lists["train"]))
    shapes = {}
    for split, entries in lists.items():
        read_shapes = []
        for entry in entries:
            try:
                read_shapes.append(_read_shape(entry, present, root))
            except ValueError as error:
                if split != "train":
                    raise GrowpruneError(
                        f"{data}: {entry}: {error}. Shapes of the {split} split are never skipped. Repair it"
                    ) from error
                bad.skip(entry, error)
        shapes[split] = together(read_shapes)
    if not bad.count:  # warn about bad shapes every time
        cache.save_arrays(source, key, {f"{split}.{k}": getattr(shapes[split], k) for split in SPLITS for k in FIELDS})
    return shapes


def _list_name(split: str) -> str:
    return f"train_test_split/shuffled_{SPLITS[split]}_file_list.json"


def _file_name(entry: str) -> str:
    return entry.removeprefix("shape_data/") + ".txt"


def _read_index(data: str, root: Root) -> set[str]:
    """Read the synsets of the categories that the data has."""
    present = set()
    for number, line in enumerate(_required(data, INDEX, root).splitlines(), 1):
        if not line.strip():
            continue
        synset = line.split()[-1]
        if synset not in SYNSETS:
            raise GrowpruneError(f"{data}: {INDEX} line {number} must name one of {', '.join(SYNSETS)}, got {line!r}")
        present.add(synset)
    return present


def _read_list(data: str, relative: str, root: Root) -> list[str]:
    try:
        entries = json.loads(_required(data, relative, root))
    except (json.JSONDecodeError, RecursionError) as error:
        raise GrowpruneError(f"{data}: {relative} is not JSON ({error}). Expected a list of shapes") from error
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise GrowpruneError(f"{data}: {relative} must be a list such as ['shape_data/<synset>/<id>', ...]")
    return entries


def _required(data: str, relative: str, root: Root) -> str:
    try:
        return (root / relative).read_bytes().decode("utf-8", "replace")
    except FileNotFoundError as error:
        raise GrowpruneError(f"{data} has no {relative}. Expected {LAYOUT}") from error
    except UNREADABLE as error:
        raise GrowpruneError(f"{data}: cannot read {relative} ({error}). Download it again") from error


def _read_shape(entry: str, present: set[str], root: Root) -> tuple[NDArray[np.float32], int]:
    """Read the points of a shape as a matrix, and its category."""
    file = _file_name(entry)
    synset, *rest = file.split("/")
    if len(rest) != 1:
        raise GrowpruneError("it must be shape_data/<synset>/<id>")
    if synset not in present:
        raise GrowpruneError(f"its category {synset!r} is not in {INDEX}")
    try:
        text = (root / file).read_bytes().decode("latin-1")  # never fails; words that are not numbers are found later
    except FileNotFoundError as error:
        raise GrowpruneError(f"{file} does not exist") from error
    except UNREADABLE as error:
        raise GrowpruneError(f"cannot read {file} ({error})") from error
    matrix, category = parse(text), list(SYNSETS).index(synset)
    parts = parts_by_category()[category]
    rows = ~np.isfinite(matrix).all(1)
    if rows.any():
        raise GrowpruneError(f"point {rows.argmax() + 1} has a non-finite value")
    rows = ~np.isin(matrix[:, 6], parts)
    if rows.any():
        raise GrowpruneError(
            f"labels of category {SYNSETS[synset][0]} must be {parts.start} to {parts.stop - 1}, "
            f"got {matrix[rows.argmax(), 6]:g} for point {rows.argmax() + 1}"
        )
    return matrix, category


def parse(text: str) -> NDArray[np.float32]:
    lines = text.splitlines()
    if not text.strip():
        raise GrowpruneError("the shape has no points")
    try:
        matrix = np.loadtxt(lines, dtype=np.float32, comments=None, ndmin=2)
        if matrix.shape[1] == len(COLUMNS):
            return matrix
    except ValueError:
        pass
    raise GrowpruneError(_first_bad(lines))


def _first_bad(lines: list[str]) -> str:
    """Describe the first line that is not a valid point."""
    for number, line in enumerate(lines, 1):
        words = line.split()
        if words and len(words) != len(COLUMNS):
            return f"line {number} has {len(words)} columns, not the {len(COLUMNS)} of {' '.join(COLUMNS)}"
        for word in words:
            try:
                np.loadtxt([word], dtype=np.float32, comments=None)
            except ValueError:
                return f"line {number} has {word!r}, which is not a number"
    return "it cannot be read as numbers"


def together(shapes: list[tuple[NDArray[np.float32], int]]) -> Shapes:
    everything = np.concatenate([np.empty((0, len(COLUMNS)), np.float32), *(matrix for matrix, _ in shapes)])
    counts = np.array([len(matrix) for matrix, _ in shapes], np.int64)
    points, labels = everything[:, :6].copy(), everything[:, 6].astype(np.uint8)
    for xyz in np.split(points[:, :3], counts.cumsum()[:-1]) if shapes else ():
        centred = xyz.astype(np.float64) - xyz.mean(0, dtype=np.float64)
        xyz[:] = centred / (np.linalg.norm(centred, axis=1).max() or 1)  # in `points`
    return Shapes(points, labels, counts, np.array([category for _, category in shapes], np.int64))


Batch = tuple[Tensor, Tensor, Tensor]
"""Points (B, N, 3 or 6), categories (B,), and the part of each point (B, N)."""


@dataclass(frozen=True)
class DeviceShapes:
    """The shapes of a split; see Shapes."""

    points: Tensor
    labels: Tensor
    starts: Tensor
    """Index of the first point of each shape."""
    counts: Tensor
    categories: Tensor
    longest: int
    """The largest count, stored so that nobody has to wait for the device."""


@functools.cache
def shapes_on(data: str, split: str, device: torch.device) -> DeviceShapes:
    shapes = shapes_of(data, split)
    starts = shapes.counts.cumsum() - shapes.counts
    arrays = (shapes.points, shapes.labels, starts, shapes.counts, shapes.categories)
    points, labels, first, counts, categories = (torch.from_numpy(array).to(device) for array in arrays)
    return DeviceShapes(points, labels, first, counts, categories, int(shapes.counts.max()))


@functools.cache
def evaluation_set(data: str, split: str, num_points: int, device: torch.device) -> Batch:
    """Return all shapes of a split. Their points are drawn once, on the CPU, so that all devices use the same."""
    shapes = shapes_on(data, split, torch.device("cpu"))
    everything = torch.arange(len(shapes.counts))
    points, categories, labels = draw(shapes, everything, num_points, torch.Generator().manual_seed(0))
    return points.to(device), categories.to(device), labels.to(device)


def draw(shapes: DeviceShapes, indices: Tensor, num_points: int, generator: torch.Generator) -> Batch:
    """Draw points of some shapes in random order. If a shape has too few points, they repeat."""
    device = indices.device
    counts = shapes.counts[indices].unsqueeze(1)
    keys = torch.rand(len(indices), shapes.longest, generator=generator, device=device)
    keys.masked_fill_(torch.arange(shapes.longest, device=device) >= counts, 2)  # padding comes last
    order = keys.argsort(dim=1, stable=True)
    drawn = order.gather(1, torch.arange(num_points, device=device) % counts)
    rows = shapes.starts[indices].unsqueeze(1) + drawn
    return shapes.points[rows], shapes.categories[indices], shapes.labels[rows].long()


def mixed(seed: int, number: int) -> int:
    """Combine two seeds into one."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> np.uint64(1))
