"""Image loading for tasks: Pillow, worker processes, and replicas that decode only their own images."""

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
    """A task whose streamed images are decoded only by the replica that uses them."""

    _replica = 0, 1

    def for_replica(self, index: int, count: int) -> Self:
        """The same task for replica `index` of `count`; see `Task`."""
        task = copy.copy(self)
        object.__setattr__(
            task, "_replica", (index, count)
        )  # not a field of the dataclass, because it does not change results
        return task


def pillow(extra: str) -> Any:
    """Pillow's Image module. `extra` is the extra of growprune that installs it."""
    return need("PIL.Image", extra, "reading images needs Pillow")


def unreadable(image_module: Any) -> tuple[type[Exception], ...]:
    """The errors that Pillow raises for a file that is not an image, or is broken."""
    return OSError, ValueError, SyntaxError, RuntimeError, image_module.DecompressionBombError


def to_rgb(image: Any) -> Any:
    """Convert a Pillow image to 8-bit RGB. Pillow alone turns most 16-bit images white."""
    if image.mode.startswith("I;16"):
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        return pillow("tasks").fromarray(grey).convert("RGB")
    if image.mode in ("I", "F"):
        raise GrowpruneError(f"images must have 8 or 16 bits, got Pillow mode {image.mode!r}. Convert the image")
    return image.convert("RGB")


def decoding(
    dataset: Dataset[Any],
    batches: Sequence[Sequence[tuple[int, bool]]],
    collate: Callable[[list[Any]], Any],
    *,
    workers: int,
    device: torch.device,
) -> DataLoader[Any]:
    """A loader that decodes batches in order in worker processes. Indices are (number, whether it is used)."""
    return DataLoader(
        dataset,
        batch_sampler=batches,  # type: ignore[arg-type]  # torch says lists, and takes any sequence
        num_workers=min(workers, num_cores()),  # more workers are slower, and torch warns
        collate_fn=collate,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # without it, the loader would change the global generator
    )
