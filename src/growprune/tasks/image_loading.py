"""What tasks on images share: Pillow, processes that decode, and replicas that each decode their own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from growprune.errors import GrowpruneError, need
from growprune.tasks.cores import num_cores
from growprune.tasks.task import Task


class Shareable(Task):
    """A task whose streamed images are decoded only by the replica that looks at them."""

    _replica = 0, 1

    def for_replica(self, index: int, count: int) -> Self:
        """The same task for replica `index` of `count`; see `Task`."""
        task = copy.copy(self)
        object.__setattr__(task, "_replica", (index, count))  # not a setting of the dataclass: it changes no result
        return task


def pillow(extra: str) -> Any:
    """Pillow's Image module; `extra` is what of growprune to install for it."""
    return need("PIL.Image", extra, "images are read with Pillow")


def unreadable(image_module: Any) -> tuple[type[Exception], ...]:
    """What Pillow raises for a file that is no image, or a broken one."""
    return OSError, ValueError, SyntaxError, RuntimeError, image_module.DecompressionBombError


def to_rgb(image: Any) -> Any:
    """A Pillow image with 8 bits for each of three colours; left to itself, Pillow makes most of 16 bits white."""
    if image.mode.startswith("I;16"):
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        return pillow("tasks").fromarray(grey).convert("RGB")
    if image.mode in ("I", "F"):
        raise GrowpruneError(f"nobody knows what is white in its mode {image.mode!r}: save it with 8 or 16 bits")
    return image.convert("RGB")


def decoding(
    dataset: Dataset[Any],
    batches: Sequence[Sequence[tuple[int, bool]]],
    collate: Callable[[list[Any]], Any],
    *,
    workers: int,
    device: torch.device,
) -> DataLoader[Any]:
    """A loader whose processes decode batches in order; a dataset is asked for (number, whether it is wanted)."""
    return DataLoader(
        dataset,
        batch_sampler=batches,  # type: ignore[arg-type]  # torch says lists, and takes any sequence
        num_workers=min(workers, num_cores()),  # more are slower, and torch warns of them
        collate_fn=collate,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # else it draws from the global one, and resuming within an epoch would show
    )
