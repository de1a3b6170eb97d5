"""Sources of images: class folders, or JPEG files packed into one file. Nothing is decoded here."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from growprune.errors import GrowpruneError
from growprune.tasks.bad_records import BadRecords, check_split, cut_validation, find, read_arrays
from growprune.tasks.images import Array

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
    """Return a function that counts images that cannot be read, for training and for test apart."""
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
