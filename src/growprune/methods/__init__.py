"""Every method, one paper per file. To add one: write its file, add its line here.

A method sees a partition S and yields phases (see `growprune.plan`); it never sees a model, so nothing here may
import torch.
"""

from collections.abc import Callable

from growprune.methods.cyclic_gap import cyclic_gap
from growprune.methods.dense import dense
from growprune.methods.one_shot import one_shot
from growprune.methods.parallel_gap import parallel_gap
from growprune.methods.random_gap import random_gap
from growprune.plan import Plan

METHODS: dict[str, Callable[..., Plan]] = {
    "cyclic_gap": cyclic_gap,
    "parallel_gap": parallel_gap,
    "random_gap": random_gap,
    "one_shot": one_shot,
    "dense": dense,
}

__all__ = ["METHODS", "cyclic_gap", "dense", "one_shot", "parallel_gap", "random_gap"]
