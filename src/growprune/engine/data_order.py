"""Which batches a run sees: the seed of each epoch, and a fingerprint that tells whether two runs saw the same."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from growprune.engine.batch_split import digest
from growprune.engine.recipe import Recipe
from growprune.masks.ranking import salt_of


def seed_of_epoch(seed: int, branch: int | None, epoch: int) -> int:
    """What decides the order and the augmentation of an epoch."""
    return salt_of(seed, "data", branch, epoch) >> 1


def fingerprint(recipe: Recipe, num_batches: int) -> dict[str, Any]:
    """How many batches an epoch has, and a digest of the first batch of the run, as it is made on a CPU.

    Runs with the same data, batch size, augmentation and seed have the same one, whatever their method.
    """
    seed = seed_of_epoch(recipe.seed, None, 0)
    first = next(iter(recipe.task.batches(seed=seed, start=0, device=torch.device("cpu"))), None)
    text = hashlib.sha256(digest(first).encode()).hexdigest()
    return {"num_batches": num_batches, "first_batch": text[:16]}
