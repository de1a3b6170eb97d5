"""Save and restore the global random states of Python, numpy and torch. Models and tasks may draw from any of them."""

# ruff: noqa: NPY002  the legacy generator is the one that others use without being handed one

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch

from growprune.masks.ranking import salt_of


def seed_all(*what: object) -> None:
    """Seed every global generator from all arguments, and from nothing else."""
    seed = salt_of(*what) >> 1
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Return the state of every global random number generator that a model or task may draw from."""
    name, keys, *rest = cast("tuple[Any, ...]", np.random.get_state(legacy=True))
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype("int64")), tuple(rest)),
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
