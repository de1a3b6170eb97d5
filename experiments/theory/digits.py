"""The library's methods on the digits task, all with the same number of epochs. 1,197 images; seconds a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import growprune as gp

PER_EPOCH = 19
"""Batches of 64 images."""
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)

METHODS: dict[str, Callable[..., gp.Plan]] = {
    "cyclic_gap": lambda S, s, T, n: gp.methods.cyclic_gap(S, sparsity=s, **_steps(T)),
    "cyclic_gap, one curve": lambda S, s, T, n: gp.methods.cyclic_gap(S, sparsity=s, restart=False, **_steps(T)),
    "random_gap": lambda S, s, T, n: gp.methods.random_gap(S, sparsity=s, kappa=4, seed=n, **_steps(T)),
    "set": lambda S, s, T, n: gp.methods.set_(S, sparsity=s, iterations=PER_EPOCH * T, every=PER_EPOCH),
    "rigl": lambda S, s, T, n: gp.methods.rigl(S, sparsity=s, iterations=PER_EPOCH * T, every=PER_EPOCH),
    "static_random": lambda S, s, T, n: gp.methods.static_random(S, sparsity=s, iterations=PER_EPOCH * T),
    "gmp": lambda S, s, T, n: gp.methods.gmp(S, sparsity=s, iterations=PER_EPOCH * T, every=PER_EPOCH),
    "acdc": lambda S, s, T, n: gp.methods.acdc(S, sparsity=s, iterations=PER_EPOCH * T),
    "one_shot": lambda S, s, T, n: gp.methods.one_shot(S, sparsity=s, epochs=2 * T // 5, finetune=T - 2 * T // 5),
    "dense": lambda S, s, T, n: gp.methods.dense(S, epochs=T),
}
"""By name, a plan: given the parts (one for each layer), the sparsity, the epochs in all, and a seed."""


def _steps(epochs: int) -> dict[str, int]:
    """C-GaP in two fifths of the epochs, two rounds of four parts; the rest is fine-tuning."""
    each = max(1, epochs // 20)
    return {"steps": 8, "epochs": each, "finetune": epochs - 8 * each}
