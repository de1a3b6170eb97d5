"""The official table of the ShapeNet part benchmark: 16 categories of objects and the 50 parts they are made of."""

from __future__ import annotations

import torch
from torch import Tensor

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
"""By folder: the category's name and its number of parts. Parts are numbered through, in this order."""

NUM_CATEGORIES = len(SYNSETS)
NUM_PARTS = sum(count for _, count in SYNSETS.values())


def parts_by_category() -> list[range]:
    """The parts of each category.

    >>> parts_by_category()[:3]
    [range(0, 4), range(4, 6), range(6, 8)]
    """
    ranges, first = [], 0
    for _, count in SYNSETS.values():
        ranges.append(range(first, first + count))
        first += count
    return ranges


def parts_of(categories: Tensor) -> Tensor:
    """Which parts belong to each shape's category, as a mask."""
    owners = [category for category, parts in enumerate(parts_by_category()) for _ in parts]
    return torch.tensor(owners, device=categories.device) == categories[:, None]  # (B, parts)
