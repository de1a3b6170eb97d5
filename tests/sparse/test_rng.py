"""Random numbers: every global generator is seeded, kept and taken back."""

import random
from pathlib import Path

import numpy as np
import torch

from growprune.files import checkpoint
from growprune.sparse.rng import rng_state, seed_all, set_rng_state


def test_every_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    def draw() -> tuple[float, ...]:
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(()))  # noqa: NPY002

    seed_all(0, "x")
    draw()
    checkpoint.save(tmp_path, 1, rng_state())
    expected = draw()
    draw()
    set_rng_state(checkpoint.load(tmp_path / "00000001"))
    assert draw() == expected


def test_seeding_depends_on_everything_named() -> None:
    seeds = []
    for what in ((0, "a"), (0, "b"), (1, "a"), (0, "a")):
        seed_all(*what)
        seeds.append(float(torch.rand(())))
    assert seeds[0] == seeds[3]
    assert len(set(seeds)) == 3
