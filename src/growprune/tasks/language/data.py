"""A text file as bytes, cut by position into 90 % to train on, 5 % to validate and 5 % to test, and batches of it.

An epoch goes once over the training text: the text is cut into pieces of one length that do not overlap, from an offset
that is drawn for each epoch, and the pieces come in random order. So a byte is at another place of its piece in each
epoch. What does not fill a piece or a batch is left out: all batches have one shape.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.tasks.bad_records import find

LAYOUT = "a text file with one byte per character"


@functools.cache
def load(data: str) -> dict[str, Tensor]:
    """Read a file and cut it: the bytes (uint8) of each split."""
    path = find(data, "", layout=LAYOUT)
    if not path.is_file():
        raise GrowpruneError(f"--data must be {LAYOUT}, but {path} is a folder. Give the file itself")
    return cut(path.read_bytes(), path)


def cut(content: bytes, source: Path | str = "the text") -> dict[str, Tensor]:
    """The first 90 % of a text, the next 5 %, and the rest.

    >>> {split: len(part) for split, part in cut(bytes(60)).items()}
    {'train': 54, 'validation': 3, 'test': 3}
    """
    size = len(content)
    ends = (size * 90 // 100, size * 95 // 100)
    parts = {"train": content[: ends[0]], "validation": content[ends[0] : ends[1]], "test": content[ends[1] :]}
    if any(len(part) < 2 for part in parts.values()):  # a byte to look at, and one to predict
        raise GrowpruneError(f"--data must have at least 40 bytes, but {source} has {size}. Use a longer text")
    return {split: torch.from_numpy(np.frombuffer(part, np.uint8).copy()) for split, part in parts.items()}


@functools.cache
def on_device(data: str, split: str, device: torch.device) -> Tensor:
    """The bytes of a split on a device, copied once."""
    return load(data)[split].to(device)


def num_batches(size: int, context: int, batch_size: int) -> int:
    """The number of batches that a text of `size` bytes fills at any offset.

    >>> num_batches(41, context=4, batch_size=3), num_batches(39, context=4, batch_size=3)
    (3, 2)
    """
    return (size - context) // context // batch_size


def shuffled(text: Tensor, context: int, batch_size: int, *, seed: int, start: int) -> Iterator[Tensor]:
    """The batches of an epoch from number `start` on: pieces (batch_size, context + 1), each with the byte after it."""
    generator = np.random.default_rng(seed)
    offset = int(generator.integers(context))
    num_pieces = (len(text) - 1 - offset) // context
    order = torch.from_numpy(generator.permutation(num_pieces)).to(text.device)  # once: the host need not wait again
    places = torch.arange(context + 1, device=text.device)
    for number in range(start, num_batches(len(text), context, batch_size)):
        pieces = order[number * batch_size : (number + 1) * batch_size]
        yield text[offset + context * pieces[:, None] + places].long()


def in_order(text: Tensor, context: int, batch_size: int) -> Iterator[Tensor]:
    """All of a text in pieces as above, one after the other; the last of them is shorter and comes alone.

    So each byte but the first is predicted once.
    """
    num_pieces = (len(text) - 1) // context
    places = torch.arange(context + 1, device=text.device)
    for start in range(0, num_pieces, batch_size):
        pieces = torch.arange(start, min(start + batch_size, num_pieces), device=text.device)
        yield text[context * pieces[:, None] + places].long()
    if len(rest := text[context * num_pieces :]) > 1:
        yield rest[None].long()
